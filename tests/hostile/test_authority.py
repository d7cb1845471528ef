"""Who may say what to whom: every message from every role to every role."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
from msgspec.structs import replace

from hetrl.runtime import wire
from hetrl.runtime.transport import offences
from hetrl.runtime.wire.authority import ANSWERS, AUTHORITY, OfTheTable
from hetrl.workload import ACTOR_GENERATION, ACTOR_TRAINING, TASKS
from lab.hostile.ear import Ear
from lab.hostile.feeding import ROLES
from lab.hostile.fuzzer import MESSAGES, value_of

SOURCES = (*ROLES, wire.GATEWAY, "stranger")
TRANSPORT_PAGE = Path(__file__).parents[2] / "docs" / "transport.md"
_EITHER = (wire.Failed, wire.Undeliverable)
_ANSWERS_ONLY = {answer for answers in ANSWERS.values() for answer in answers}


def allowed(kind: type[wire.Tagged], source: str, receiver: str, same_site: bool) -> bool:
    """Whether the table has a line for it."""
    return any(
        source in say.sources and receiver in say.receivers and (same_site or not say.home) for say in AUTHORITY[kind]
    )


def test_the_table_has_every_message_and_asks_for_answers_that_there_are() -> None:
    assert set(AUTHORITY) == set(MESSAGES)
    assert set(ANSWERS) | _ANSWERS_ONLY <= set(MESSAGES)
    assert not set(ANSWERS) & _ANSWERS_ONLY


@pytest.mark.parametrize("role", ROLES)
def test_a_member_takes_from_every_role_what_the_table_allows_and_nothing_else(
    role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offences, "MOST_OFFENCES", 10**9)
    chance = random.Random(0)

    async def scenario() -> None:
        for source in SOURCES:
            for site in ("alpha", "beta"):
                address, ear = wire.address(site, source), Ear(wire.address("alpha", role))
                for kind in MESSAGES:
                    for reply_to in (None, 99):
                        message = _sample(kind, address, chance)
                        said = allowed(kind, source, role, site == "alpha")
                        fits = kind in _EITHER or (kind in _ANSWERS_ONLY) == (reply_to is not None)
                        assert ear.told(address, message, reply_to) == (said and fits), (kind, address, reply_to)

    asyncio.run(scenario())


def _sample(kind: type[wire.Tagged], source: str, chance: random.Random) -> wire.Tagged:
    """A message of a type with anything in it, but for what refers to channels and members that there are."""
    match value_of(kind, chance):
        case wire.Undeliverable():
            return wire.Undeliverable(receiver=source, cause="")
        case wire.Acknowledged() as report:
            return replace(report, incarnation=1, stream=1, cumulative=0, ranges=(), taken_bytes=0)
        case wire.Probe() as probe:
            return replace(probe, stream=1)
        case message:
            return message


@pytest.mark.parametrize("source", SOURCES)
def test_a_gateway_takes_from_every_role_what_the_table_allows_and_nothing_else(source: str) -> None:
    table, chance = OfTheTable(), random.Random(0)
    for site in ("alpha", "beta"):
        for kind in MESSAGES:
            header = wire.Header(
                run="run", source=wire.address(site, source), to=("alpha/gateway/0",), id=1, reply_to=None
            )
            refused = table.refusal(value_of(kind, chance), header, "alpha/gateway/0")
            fits = kind in _EITHER or kind not in _ANSWERS_ONLY
            assert (refused is None) == (allowed(kind, source, wire.GATEWAY, site == "alpha") and fits), (kind, site)


def test_nobody_but_the_controller_ends_a_run_and_nobody_but_a_trainer_sends_weights() -> None:
    for kind in (wire.Abort, wire.Go):
        assert {source for say in AUTHORITY[kind] for source in say.sources} == {wire.CONTROLLER}
    for kind in (wire.WeightsBegin, wire.WeightsTensor, wire.WeightsEnd):
        to_generation = [say.sources for say in AUTHORITY[kind] if ACTOR_GENERATION in say.receivers]
        assert to_generation == [{ACTOR_TRAINING}]


def test_the_page_has_the_table() -> None:
    page = TRANSPORT_PAGE.read_text()
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    for kind, says in AUTHORITY.items():
        (row,) = [line for line in rows if line.startswith(f"| `{kind.__name__}` |")]
        assert row == page_row(kind, says)


def page_row(kind: type[wire.Tagged], says: tuple) -> str:
    """Return the line of a message on the page."""
    lines = "; ".join(f"{_roles(say.sources)} to {_roles(say.receivers)}{' of its site' * say.home}" for say in says)
    answered = ", ".join(f"`{one.__name__}`" for one in ANSWERS.get(kind, ()))
    return f"| `{kind.__name__}` | {lines} | {answered} |"


def _roles(roles: frozenset[str]) -> str:
    """Return what a set of roles is called on the page."""
    ranks = {task + wire.RANK for task in TASKS}
    names = {
        frozenset(ROLES): "every member",
        frozenset(TASKS): "every task",
        frozenset(ranks): "ranks",
        frozenset({*TASKS, *ranks}): "every task and rank",
    }
    return names.get(roles) or ", ".join(sorted(role.replace("_", " ") for role in roles))
