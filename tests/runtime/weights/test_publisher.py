"""What a publisher makes of receivers that fail."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import pytest
import torch

from hetrl.errors import HetrlError
from hetrl.runtime import wire
from hetrl.runtime.rl.tasks import Trainer
from hetrl.runtime.transport.exchange import WINDOW_BYTES
from hetrl.runtime.transport.links import Links
from hetrl.runtime.transport.member import Envelope, Member, RunAborted
from hetrl.runtime.weights.kept import Kept
from hetrl.runtime.weights.publisher import Publisher


class Receivers:
    """Answer as they are told to: with a message, an error, or, None, as one that applied the version."""

    def __init__(self, answers: dict[str, wire.Message | HetrlError | None]) -> None:
        self._answers = answers
        self.links = Links()
        self.sent: list[tuple[tuple[str, ...], wire.Message]] = []
        self.given_up = set[wire.Priority]()
        self.abandoned: dict[str, asyncio.Event] = {to: asyncio.Event() for to in answers}

    async def send(self, to: Sequence[str], message: wire.Message, buffers: object = ()) -> None:
        self.sent.append((tuple(to), message))

    def open_bytes(self, address: str, priority: wire.Priority) -> int:
        return 0

    def abandon(self, address: str, priority: wire.Priority, cause: str) -> None:
        self.given_up.add(priority)
        self.abandoned[address].set()

    async def request(self, to: str, end: wire.WeightsEnd, **_: Any) -> Envelope:
        self.sent.append(((to,), end))
        answer = self._answers[to]
        if self.links.are_out(to):
            await self.abandoned[to].wait()
            answer = HetrlError("abandoned")
        if isinstance(answer, HetrlError):
            raise answer
        message = wire.WeightsApplied(version=end.version, digest=end.digest, seconds=0.5)
        return Envelope(cast(Any, None), answer or message, ())


def published(answers: dict[str, wire.Message | HetrlError | None]) -> wire.Published:
    async def run() -> wire.Published:
        request = wire.Publish(version=4, receivers=tuple(answers), quorum=1)
        return await Publisher(cast(Member, Receivers(answers)), request, Kept()).finish()

    return asyncio.run(run())


def test_receivers_that_fail_are_named_and_the_others_have_the_version() -> None:
    found = published(
        {
            "a": None,
            "b": HetrlError("b failed (apply weight version 4): out of memory"),
            "c": wire.WeightsRejected(version=4, cause="a tensor is missing"),
            "d": wire.WeightsApplied(version=4, digest="other", seconds=0.1),
            "e": wire.Done(),
        }
    )
    assert found.apply_seconds == {"a": 0.5}
    assert set(found.failed) == {"b", "c", "d", "e"}
    assert "out of memory" in found.failed["b"]
    assert found.failed["c"] == "c: refused weight version 4: a tensor is missing"
    assert "d: weight version 4 arrived as other" in found.failed["d"]
    assert found.failed["e"] == "e: answered Done to weight version 4"


@pytest.mark.parametrize("when", ["before", "in the middle", "at the end"])
@pytest.mark.parametrize(("quorum", "out", "left_out"), [(1, "b", ("b/x/0",)), (0, "ab", ("a/x/0", "b/x/0"))])
def test_who_is_behind_a_link_that_is_out_is_left_out(
    when: str, quorum: int, out: str, left_out: tuple[str, ...]
) -> None:
    receivers = Receivers({"a/x/0": None, "b/x/0": None})

    async def run() -> wire.Published:
        request = wire.Publish(version=4, receivers=("a/x/0", "b/x/0"), quorum=quorum)
        publisher = Publisher(cast(Member, receivers), request, Kept())

        def cut(now: str) -> None:
            for site in out if now == when else "":
                receivers.links.lost(site)

        cut("before")
        with publisher.leaving_out():
            sending = asyncio.create_task(publisher.send())
            await asyncio.sleep(0.01)
            cut("in the middle")
            await asyncio.to_thread(publisher.take, [("w", torch.ones(3))])
            await sending
            asyncio.get_running_loop().call_later(0.01, cut, "at the end")
            if when == "at the end":
                receivers._answers["b/x/0"] = None
            return await publisher.finish()

    async def slowly(to: str, end: wire.WeightsEnd, **_: Any) -> Envelope:
        await asyncio.sleep(0.05 if to[0] in out else 0)
        return await Receivers.request(receivers, to, end)

    receivers.request = slowly  # type: ignore[method-assign]
    found = asyncio.run(run())
    assert found.left_out == {one: f"the link to {one[0]} is out" for one in left_out}
    assert set(found.apply_seconds) == {"a/x/0", "b/x/0"} - set(left_out)
    assert found.failed == {}
    assert receivers.given_up == {wire.Priority.WEIGHTS}
    tensors = [to for to, message in receivers.sent if isinstance(message, wire.WeightsTensor)]
    everybody = when == "at the end"
    assert tensors == ([("a/x/0", "b/x/0")] if everybody else [("a/x/0",)] if quorum else [])


@pytest.mark.parametrize("gives_way", [False, True])
def test_all_of_a_version_gives_way_or_nothing_of_it(gives_way: bool) -> None:
    refusal = wire.WeightsRejected(version=4, cause="wrong base")
    receivers = Receivers({"a/x/0": None, "b/x/0": refusal, "c/x/0": None})
    channel = wire.Priority.LATER_WEIGHTS if gives_way else wire.Priority.WEIGHTS

    async def run() -> wire.Published:
        request = wire.Publish(version=4, receivers=("a/x/0", "b/x/0", "c/x/0"), quorum=1, gives_way=gives_way)
        publisher = Publisher(cast(Member, receivers), request, Kept())
        receivers.links.lost("c")
        with publisher.leaving_out():
            await asyncio.to_thread(publisher.take, [("w", torch.ones(3))])
            await publisher.send()
            return await publisher.finish()

    assert asyncio.run(run()).repaired == {"b/x/0": "refused weight version 4: wrong base"}
    kinds = [type(message) for to, message in receivers.sent if "b/x/0" in to]
    assert kinds == [wire.WeightsBegin, wire.WeightsTensor, wire.WeightsEnd] * 2
    assert {wire.priority_of(message) for _, message in receivers.sent} == {channel}
    assert receivers.given_up == {channel}


def test_a_quorum_is_waited_for() -> None:
    receivers = Receivers({"a/x/0": None, "b/x/0": None})

    async def run() -> wire.Published:
        request = wire.Publish(version=4, receivers=("a/x/0", "b/x/0"), quorum=1)
        publisher = Publisher(cast(Member, receivers), request, Kept())
        receivers.links.lost("a")
        receivers.links.lost("b")
        with publisher.leaving_out():
            assert not any(event.is_set() for event in receivers.abandoned.values())
            receivers.links.restored("a")
            return await publisher.finish()

    found = asyncio.run(run())
    assert (set(found.apply_seconds), set(found.left_out)) == ({"a/x/0"}, {"b/x/0"})


SLOW = {"b/x/0": "it took longer than 0.05 s for a version, and others did not"}


@pytest.mark.parametrize(("slow", "left_out"), [("b", SLOW), ("ab", {})])
def test_who_holds_the_others_up_is_left_out(slow: str, left_out: dict[str, str]) -> None:
    """Not where everybody is slow: then the trainer is, or what they share."""
    receivers = Receivers({"a/x/0": None, "b/x/0": None})
    let = asyncio.Event()

    async def send(to: Sequence[str], message: wire.Message, buffers: object = ()) -> None:
        await Receivers.send(receivers, to, message, buffers)
        if "b/x/0" in to and isinstance(message, wire.WeightsTensor):
            waits = [asyncio.create_task(one.wait()) for one in (let, receivers.abandoned["b/x/0"])]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)

    receivers.send = send  # type: ignore[method-assign]
    receivers.open_bytes = lambda to, _: WINDOW_BYTES if to[0] in slow else 2**20  # type: ignore[method-assign]
    found = asyncio.run(_published_impatiently(receivers, let))
    assert (found.left_out, found.failed) == (left_out, {})
    assert set(found.apply_seconds) == {"a/x/0", "b/x/0"} - set(left_out)


@pytest.mark.parametrize("first", [True, False])
def test_who_says_nothing_is_left_out_once_another_one_has_the_version(first: bool) -> None:
    receivers = Receivers({"a/x/0": None, "b/x/0": None})
    let = asyncio.Event()

    async def request(to: str, end: wire.WeightsEnd, **_: Any) -> Envelope:
        if to == "b/x/0":
            await receivers.abandoned[to].wait()
            raise HetrlError("abandoned")
        if not first:
            await let.wait()
        return await Receivers.request(receivers, to, end)

    receivers.request = request  # type: ignore[method-assign]
    found = asyncio.run(_published_impatiently(receivers, let, waits=not first))
    assert (found.left_out, set(found.apply_seconds), found.failed) == (SLOW, {"a/x/0"}, {})


def test_who_is_left_out_while_it_gets_the_full_set_once_more_is_asked_nothing_else() -> None:
    receivers = Receivers({"a/x/0": None, "b/x/0": wire.WeightsRejected(version=4, cause="wrong base")})

    async def send(to: Sequence[str], message: wire.Message, buffers: object = ()) -> None:
        await Receivers.send(receivers, to, message, buffers)
        if tuple(to) == ("b/x/0",):  # only what comes once more goes to it alone
            await receivers.abandoned["b/x/0"].wait()

    receivers.send = send  # type: ignore[method-assign]
    let = asyncio.Event()
    let.set()
    found = asyncio.run(_published_impatiently(receivers, let))
    assert (found.left_out, set(found.apply_seconds), found.failed) == (SLOW, {"a/x/0"}, {})
    ends = [to for to, message in receivers.sent if isinstance(message, wire.WeightsEnd)]
    assert sorted(ends) == [("a/x/0",), ("b/x/0",)]


async def _published_impatiently(receivers: Receivers, let: asyncio.Event, *, waits: bool = False) -> wire.Published:
    kept = Kept()
    request = wire.Publish(version=4, receivers=("a/x/0", "b/x/0"), quorum=1, patience_seconds=0.05)
    publisher = Publisher(cast(Member, receivers), request, kept)

    async def send() -> wire.Published:
        await publisher.send()
        return await publisher.finish()

    with publisher.leaving_out():
        await asyncio.to_thread(publisher.take, [("w", torch.ones(3))])
        sending = asyncio.create_task(send())
        await asyncio.sleep(0.3)
        if waits:
            assert not receivers.abandoned["b/x/0"].is_set(), "nobody has the version"
        let.set()
        async with asyncio.timeout(5):
            found = await sending
    assert kept.behind == set(found.left_out)
    return found


def test_a_version_that_nobody_took_is_an_error() -> None:
    with pytest.raises(HetrlError, match=r"refused weight version 4: too small; b failed"):
        published({"a": wire.WeightsRejected(version=4, cause="too small"), "b": HetrlError("b failed")})


def test_the_end_of_the_run_is_no_failure_of_a_receiver() -> None:
    with pytest.raises(RunAborted):
        published({"a": None, "b": RunAborted("the controller ends it")})


@pytest.mark.parametrize("quorum", [1, None])
def test_weights_that_a_task_cannot_do_without_must_reach_all(quorum: int | None) -> None:
    class Answers:
        async def request(self, _: str, message: wire.Message, *__: Any, **___: Any) -> Envelope:
            if isinstance(message, wire.Publish):
                return Envelope(cast(Any, None), wire.Exported(version=4), ())
            answer = wire.Published(
                version=4, digest="d", bytes=1, seconds=0.1, apply_seconds={"a": 0.1}, failed={"b": "b failed"}
            )
            return Envelope(cast(Any, None), answer, ())

    trainer = Trainer(cast(Member, Answers()), "actor_training", "a/actor_training/0", ("a", "b"))
    if quorum:
        assert asyncio.run(trainer.publish(4, quorum=quorum)).failed == {"b": "b failed"}
    else:
        with pytest.raises(HetrlError, match="b failed"):
            asyncio.run(trainer.publish(4))
