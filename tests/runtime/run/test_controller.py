"""How a controller ends that cannot go on."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from hetrl.errors import GangTimeoutError, HetrlError
from hetrl.files import EventLog, read_lines
from hetrl.runtime.run import controller
from hetrl.runtime.run.context import Context
from lab.quick import quick_plan
from tests.launch.launch_cases import quick_experiment

FULL = OSError(errno.ENOSPC, "No space left on device", "events.jsonl")


class _Member:
    def __init__(self) -> None:
        self.sent = list[tuple[str, str]]()

    def start_heartbeat(self, *_: object) -> None:
        pass

    async def send(self, to: object, message: Any) -> None:
        self.sent.append((type(message).__name__, message.cause))


def _ended_by(error: Exception, directory: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[_Member, Exception]:
    """Let a controller fail while it gathers its members; return what it told them, and how it ended."""
    member = _Member()

    class Alone(Context):
        @asynccontextmanager
        async def member(self, *_: object) -> AsyncIterator[Any]:  # type: ignore[override]
            yield member

    class Fails:
        living = ()

        def __init__(self, *_: object) -> None:
            pass

        async def gather(self, *_: object) -> None:
            raise error

    monkeypatch.setattr(controller, "Membership", Fails)
    context = Alone(directory, "run", "alpha", "alpha", "", {}, {}, quick_experiment(), quick_plan())
    with pytest.raises(Exception, match=".") as caught:
        asyncio.run(controller.control(context))
    return member, caught.value


@pytest.mark.parametrize("error", [GangTimeoutError("alpha: nobody came"), FULL, KeyError("a defect")])
def test_members_hear_why_a_controller_ends_whatever_it_is(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    member, ended = _ended_by(error, tmp_path, monkeypatch)
    ((kind, cause),) = member.sent
    assert kind == "Abort" and str(error) in cause
    assert isinstance(ended, HetrlError if error is FULL else type(error))
    (failed,) = read_lines(tmp_path / "events.jsonl")
    assert (failed["kind"], failed["cause"]) == ("failed", cause)
    assert failed["exit_code"] == (6 if isinstance(error, GangTimeoutError) else 1)


def test_members_hear_it_where_the_disk_takes_no_event(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **fields: object) -> None:
        raise FULL

    monkeypatch.setattr(EventLog, "append", full)
    member, ended = _ended_by(FULL, tmp_path, monkeypatch)
    assert [kind for kind, _ in member.sent] == ["Abort"]
    assert "No space left on device: 'events.jsonl'; mend this, then `hetrl resume`" in str(ended)


def test_a_run_goes_on_without_replicas_and_keepers_of_checkpoints() -> None:
    replicas = ("beta/actor_generation/0",)
    context, draws = SimpleNamespace(replicas=replicas), SimpleNamespace(replicas=(), lost=None)
    run = cast(controller.Run, SimpleNamespace(context=context, draws=draws, absent=set()))
    members = (*replicas, "beta/keeper/3", "alpha/actor_training/0")
    assert [controller.Run.spare(run, member, HetrlError("gone")) for member in members] == [True, True, False]
