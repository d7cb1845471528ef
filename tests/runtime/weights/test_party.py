"""Who is left out of a version because he takes nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import pytest

from hetrl.runtime import wire
from hetrl.runtime.transport.links import Links
from hetrl.runtime.transport.mailbox import DeadlineError
from hetrl.runtime.weights.kept import Kept
from hetrl.runtime.weights.latecomers import Latecomers
from hetrl.runtime.weights.party import Party

FROZEN, WELL, OTHER = (f"beta/actor_generation/{number}" for number in range(3))


class _Member:
    """One of its receivers takes nothing."""

    links = Links()

    def __init__(self) -> None:
        self.sent, self.abandoned = list[tuple[str, ...]](), list[str]()

    async def send(self, to: Sequence[str], message: wire.Message, buffers: Sequence[Any] = ()) -> None:
        if FROZEN in to:
            raise DeadlineError(f"{FROZEN} took nothing for 600 s", (FROZEN,))
        self.sent.append(tuple(to))

    async def request(self, to: str, message: wire.Message, **_: object) -> Any:
        raise AssertionError(f"nobody else is asked: {to}")

    def abandon(self, receiver: str, priority: object, cause: str) -> None:
        self.abandoned.append(receiver)


@pytest.mark.parametrize(("least", "spared"), [(0, True), (2, True), (3, False), (None, False)])
def test_who_takes_nothing_is_left_out_as_long_as_enough_remain(least: int | None, spared: bool) -> None:
    member = _Member()
    party = Party(cast(Any, member), [FROZEN, WELL, OTHER], gives_way=False, least=least)
    sending = party.send([FROZEN, WELL], wire.WeightsBegin(version=3))
    if not spared:
        with pytest.raises(DeadlineError, match="took nothing for 600 s"):
            asyncio.run(sending)
        return
    asyncio.run(sending)
    assert (member.sent, member.abandoned, party.present) == ([(WELL,)], [FROZEN], [WELL, OTHER])
    assert party.left_out == {FROZEN: f"{FROZEN} took nothing for 600 s"}
    asyncio.run(party.send([FROZEN], wire.WeightsBegin(version=3)))
    assert member.sent == [(WELL,)]


def test_a_latecomer_that_takes_nothing_stays_behind_and_ends_nothing() -> None:
    async def scenario() -> wire.Published:
        kept = Kept(version=3, digest="d")
        return await Latecomers(cast(Any, _Member()), wire.CatchUp(version=3, receivers=(FROZEN,)), kept).bring()

    published = asyncio.run(scenario())
    assert (published.apply_seconds, {*published.left_out}) == ({}, {FROZEN})
