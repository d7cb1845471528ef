"""Samples put together from the stretches of replicas that are slow, fail, or say something else."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest

from hetrl.dispatch import Begun, Capacity, Dispatch
from hetrl.errors import HetrlError
from hetrl.runtime import wire
from hetrl.runtime.rl import draws as module
from hetrl.runtime.rl.draws import Draws
from hetrl.runtime.rl.sampling import seed_of
from hetrl.runtime.rl.stretches import Drawn, Request, joined
from hetrl.runtime.rl.timeline import Timeline
from hetrl.runtime.transport.links import Links
from hetrl.runtime.transport.member import Member, RunAborted

STRETCH, LONGEST = 4, 10
Answer = Callable[[wire.Generate], Awaitable[wire.Message]]


def continuation(request: wire.Generate, version: int = 1) -> wire.Message:
    """Return what depends on the seed alone: tokens of its digits, ended where one of them is 0."""
    digits = [int(digit) for digit in f"{request.sampling.seed:031d}"[::-1]][: request.sampling.max_tokens]
    ended = 0 in digits
    tokens = tuple(digits[: digits.index(0) + 1] if ended else digits)
    spans = (wire.VersionSpan(version, 0, len(tokens)),)
    reason = "stop" if ended else "length"
    sample = wire.Sample(tokens=tokens, logprobs=(-1.0,) * len(tokens), versions=spans, finish_reason=reason)
    return wire.Generated(samples=(sample,), seconds=0.01 * len(tokens))


class Members:
    """Lets each replica answer in its way, and notes what they are asked and told."""

    def __init__(self, answers: dict[str, Answer]) -> None:
        self._answers = answers
        self.asked: list[tuple[str, wire.Generate]] = []
        self.told: list[tuple[str, wire.Message]] = []
        self.links = Links()

    async def request(self, to: str, message: wire.Generate, **_: Any) -> Any:
        self.asked.append((to, message))
        return SimpleNamespace(message=await self._answers[to](message))

    def answer(self, replica: str, answer: Answer) -> None:
        """Let a replica answer in another way from now on."""
        self._answers[replica] = answer

    async def send(self, to: str, message: wire.Message) -> int:
        self.told.append((to, message))
        return 0


async def at_once(request: wire.Generate) -> wire.Message:
    await asyncio.sleep(0)
    return continuation(request)


async def never(request: wire.Generate) -> wire.Message:
    await asyncio.Event().wait()
    raise AssertionError


async def dies(request: wire.Generate) -> wire.Message:
    await asyncio.sleep(0)
    raise HetrlError("the server ended")


def request_of(sample: int) -> Request:
    return Request(
        prompt=(7, 8),
        max_tokens=LONGEST,
        temperature=0.5,
        stop_tokens=(0,),
        seed=partial(seed_of, 3, "train", 5, sample),
        doing=f"sample {sample}",
    )


def drawn(members: Members, replicas: Sequence[str], samples: int = 6) -> tuple[tuple[Drawn, ...], dict[str, str]]:
    lost: dict[str, str] = {}
    dispatch = Dispatch({name: Capacity(2, 2) for name in replicas}, LONGEST, STRETCH)

    async def run() -> tuple[Drawn, ...]:
        draws = Draws(cast(Member, members), dispatch, lambda name, error: lost.update({name: str(error)}), Timeline())
        return await asyncio.wait_for(draws.group([request_of(k) for k in range(samples)], 0), 20.0)

    return asyncio.run(run()), lost


def test_samples_are_the_same_whoever_draws_them() -> None:
    alone, _ = drawn(Members({"a": at_once}), ["a"])
    members = Members(dict.fromkeys("abc", at_once))
    spread, _ = drawn(members, ["a", "b", "c"])
    assert [one.sample for one in alone] == [one.sample for one in spread]
    assert {name for name, _ in members.asked} == {"a", "b", "c"}
    assert len({one.sample.tokens for one in alone}) == len(alone), "each has a seed of its own"


def test_groups_that_begin_together_are_dispatched_together() -> None:
    """Each choice looks at all replicas and all prompts."""

    class Counted(Dispatch):
        choices = 0

        def next(self, now: float) -> list[Begun]:
            self.choices += 1
            return super().next(now)

    async def run() -> tuple[int, int]:
        members, dispatch = Members({"a": never}), Counted({"a": Capacity(60, 60)}, LONGEST, STRETCH)
        draws = Draws(cast(Member, members), dispatch, lambda name, error: None, Timeline())
        groups = [asyncio.create_task(draws.group([request_of(k) for k in range(3)], 0)) for _ in range(20)]
        while len(members.asked) < 60:
            await asyncio.sleep(0)
        for group in groups:
            group.cancel()
        await asyncio.gather(*groups, return_exceptions=True)
        return dispatch.choices, len(members.told)

    assert asyncio.run(run()) == (1, 60), "chosen once, and all withdrawn"


def test_a_choice_that_takes_long_is_made_for_many_answers_at_once() -> None:
    """Of answers that come in as many turns of the loop; all are taken in the end."""

    class Slow(Dispatch):
        choices = 0

        def next(self, now: float) -> list[Begun]:
            self.choices += 1
            time.sleep(0.02)
            return super().next(now)

    turns = itertools.count()

    async def later(request: wire.Generate) -> wire.Message:
        for _ in range(next(turns)):
            await asyncio.sleep(0)
        return continuation(request)

    async def run() -> tuple[int, int]:
        members, dispatch = Members({"a": later}), Slow({"a": Capacity(60, 60)}, LONGEST, STRETCH)
        draws = Draws(cast(Member, members), dispatch, lambda name, error: None, Timeline())
        await draws.group([request_of(k) for k in range(60)], 0)
        return dispatch.choices, len(members.asked)

    choices, asked = asyncio.run(run())
    assert asked >= 60 > 2 * choices


def test_a_defect_of_the_dispatch_is_raised_where_samples_are_waited_for() -> None:
    class Broken(Dispatch):
        def next(self, now: float) -> list[Begun]:
            raise ZeroDivisionError

    async def run() -> None:
        dispatch = Broken({"a": Capacity(2, 2)}, LONGEST, STRETCH)
        draws = Draws(cast(Member, Members({"a": never})), dispatch, lambda name, error: None, Timeline())
        await draws.group([request_of(0)], 0)

    with pytest.raises(ZeroDivisionError):
        asyncio.run(run())


def test_a_stretch_goes_on_where_the_one_before_ended_and_no_sample_is_too_long() -> None:
    members = Members({"a": at_once})
    found, _ = drawn(members, ["a"])
    for _, asked in members.asked:
        have = len(asked.prompt) - 2
        assert asked.prompt[:2] == (7, 8)
        assert asked.sampling.max_tokens == min(STRETCH, LONGEST - have)
        assert (asked.sampling.samples, asked.sampling.temperature, asked.sampling.stop_tokens) == (1, 0.5, (0,))
    for one in found:
        tokens = one.sample.tokens
        assert one.sample.finish_reason == ("stop" if tokens[-1] == 0 else "length")
        assert len(tokens) == LONGEST or tokens[-1] == 0
        assert 0 not in tokens[:-1]
        assert len(one.sample.logprobs) == len(tokens) == sum(part.tokens for part in one.stretches)
    assert any(len(one.stretches) == 3 for one in found)


def test_versions_of_stretches_are_told_over_the_whole_sample() -> None:
    def part(*spans: tuple[int, int, int]) -> wire.Sample:
        length = spans[-1][2]
        versions = tuple(wire.VersionSpan(*span) for span in spans)
        return wire.Sample(tokens=(1,) * length, logprobs=(0.0,) * length, versions=versions, finish_reason="length")

    whole = joined(joined(part((1, 0, 4)), part((1, 0, 1), (2, 1, 4))), part((3, 0, 2)))
    spans = [(span.version, span.start, span.end) for span in whole.versions]
    assert spans == [(1, 0, 5), (2, 5, 8), (3, 8, 10)]
    assert len(whole.tokens) == 10


@pytest.mark.parametrize("share", [0.0, 0.3, 0.7, 1.0])
def test_samples_that_were_begun_before_end_as_they_would_have_and_none_is_drawn_again(share: float) -> None:
    """Some are complete, some were cut off between stretches, some were not begun."""
    whole, _ = drawn(Members({"a": at_once}), ["a"])

    def begun(sample: wire.Sample, k: int) -> wire.Sample:
        count = int(share * len(sample.tokens)) // STRETCH * STRETCH if k % 3 else int(share) * len(sample.tokens)
        if count == len(sample.tokens):
            return sample
        spans = (wire.VersionSpan(1, 0, count),) if count else ()
        parts = {"tokens": sample.tokens[:count], "logprobs": sample.logprobs[:count], "versions": spans}
        return wire.Sample(**parts, finish_reason="length")

    have = [begun(one.sample, k) for k, one in enumerate(whole)]
    members = Members(dict.fromkeys("ab", at_once))
    dispatch = Dispatch({name: Capacity(2, 2) for name in "ab"}, LONGEST, STRETCH)

    async def scenario() -> None:
        draws = Draws(cast(Member, members), dispatch, lambda name, error: None, Timeline())
        requests = [replace(request_of(k), have=one) for k, one in enumerate(have)]
        drawing = asyncio.ensure_future(draws.group(requests, 0, 5))
        await asyncio.sleep(0)
        assert draws.under_way == {5: tuple(have)}
        found = await asyncio.wait_for(drawing, 20)
        assert [one.sample for one in found] == [one.sample for one in whole]
        assert draws.under_way == {5: tuple(one.sample for one in whole)}
        draws.forget(5)
        assert draws.under_way == {}
        fresh = [sum(part.tokens for part in one.stretches if part.replica != module.BEFORE) for one in found]
        assert fresh == [len(one.sample.tokens) - len(kept.tokens) for one, kept in zip(whole, have, strict=True)]

    asyncio.run(scenario())
    lengths = sorted(len(asked.prompt) - 2 for _, asked in members.asked)
    starts = [range(len(kept.tokens), len(one.sample.tokens), STRETCH) for one, kept in zip(whole, have, strict=True)]
    assert lengths == sorted(start for one in starts for start in one)


def test_a_replica_behind_a_link_that_is_out_rests_and_its_samples_are_drawn_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "TICK_SECONDS", 0.01)
    alone, _ = drawn(Members({"a/x/0": at_once}), ["a/x/0"])
    members = Members({"a/x/0": at_once, "b/x/0": never})
    dispatch = Dispatch({name: Capacity(2, 2) for name in ("a/x/0", "b/x/0")}, LONGEST, STRETCH)

    async def scenario() -> None:
        draws = Draws(cast(Member, members), dispatch, lambda name, error: None, Timeline())
        with members.links.told(draws.link_changed):
            drawing = asyncio.ensure_future(draws.group([request_of(k) for k in range(6)], 0))
            await asyncio.sleep(0.1)
            assert not drawing.done(), "b holds some"
            members.links.lost("b")
            found = await asyncio.wait_for(drawing, 20)
            assert [one.sample for one in found] == [one.sample for one in alone]
            members._answers["b/x/0"] = at_once
            members.asked.clear()
            await draws.group([request_of(k) for k in range(6)], 1)
            assert {name for name, _ in members.asked} == {"a/x/0"}
            draws.missed("b/x/0")
            assert (draws.behind, draws.in_step) == ((), ("a/x/0",))
            waiting = asyncio.ensure_future(draws.changed())
            await asyncio.sleep(0)
            assert not waiting.done()
            members.links.restored("b")
            await asyncio.wait_for(waiting, 5)
            assert draws.behind == ("b/x/0",)
            await draws.group([request_of(k) for k in range(6)], 2)
            assert {name for name, _ in members.asked} == {"a/x/0"}, "b has older weights"
            draws.served("b/x/0")
            assert (draws.behind, draws.in_step) == ((), ("a/x/0", "b/x/0"))
            await draws.group([request_of(k) for k in range(6)], 3)
            assert {name for name, _ in members.asked} == {"a/x/0", "b/x/0"}

    asyncio.run(scenario())


def test_what_a_lost_replica_was_asked_for_is_drawn_elsewhere() -> None:
    alone, _ = drawn(Members({"a": at_once}), ["a"])
    members = Members({"a": at_once, "b": dies})
    found, lost = drawn(members, ["a", "b"])
    assert [one.sample for one in found] == [one.sample for one in alone]
    assert lost == {"b": "the server ended"}
    assert sum(name == "b" for name, _ in members.asked) <= 2


@pytest.mark.parametrize("noticed", [True, False])
def test_a_replica_that_was_started_again_draws_once_it_has_the_newest_weights(noticed: bool) -> None:
    """Whether or not it was known to be lost: what it was asked for before is drawn, and it is asked for more."""
    members = Members({"a": never, "b": at_once})
    dispatch = Dispatch({name: Capacity(2, 2) for name in "ab"}, LONGEST, STRETCH)

    async def run() -> tuple[Drawn, ...]:
        draws = Draws(cast(Member, members), dispatch, lambda name, error: None, Timeline())
        waiting = asyncio.ensure_future(draws.group([request_of(k) for k in range(6)], 0))
        while not any(name == "a" for name, _ in members.asked):
            await asyncio.sleep(0)
        if noticed:
            draws.lost("a", HetrlError("killed"))
        await asyncio.sleep(0)
        members.answer("a", at_once)
        draws.back("a")
        assert draws.behind == ("a",) and set(draws.replicas) == {"a", "b"}
        before = len(members.asked)
        first = await asyncio.wait_for(waiting, 20.0)
        assert all(name == "b" for name, _ in members.asked[before:])
        draws.served("a")
        again = await asyncio.wait_for(draws.group([request_of(k) for k in range(6)], 1), 20.0)
        assert {name for name, _ in members.asked[before:]} == {"a", "b"}
        assert [one.sample for one in again] == [one.sample for one in first]
        return first

    alone, _ = drawn(Members({"b": at_once}), ["b"])
    assert [one.sample for one in asyncio.run(run())] == [one.sample for one in alone]


def test_an_answer_that_is_none_counts_as_a_failure() -> None:
    async def other(request: wire.Generate) -> wire.Message:
        return wire.Done()

    found, lost = drawn(Members({"a": at_once, "b": other}), ["a", "b"])
    assert len(found) == 6
    assert "answered Done" in lost["b"]


@pytest.mark.parametrize(
    ("tokens", "logprobs", "spans", "reason", "said"),
    [
        (0, 0, 0, "length", "0 tokens with 0 log-probs came, asked for at most 4"),
        (5, 5, 5, "length", "5 tokens with 5 log-probs came"),
        (4, 3, 4, "length", "4 tokens with 3 log-probs came"),
        (3, 3, 3, "length", "ended for length after 3 of 4 tokens"),
        (2, 2, 2, "abort", "ended for abort after 2 of 4 tokens"),
        (4, 4, 3, "stop", "not each of 4 tokens has a weight version"),
    ],
)
def test_a_replica_that_answers_with_what_cannot_be_is_lost(
    tokens: int, logprobs: int, spans: int, reason: str, said: str
) -> None:
    async def lies(request: wire.Generate) -> wire.Message:
        versions = (wire.VersionSpan(1, 0, spans),)
        values = {"tokens": (1,) * tokens, "logprobs": (0.0,) * logprobs, "versions": versions}
        return wire.Generated(samples=(wire.Sample(**values, finish_reason=reason),), seconds=0.1)

    found, lost = drawn(Members({"a": at_once, "b": lies}), ["a", "b"])
    assert len(found) == 6
    assert said in lost["b"]


def test_what_hangs_is_drawn_elsewhere_and_withdrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TICK_SECONDS", 0.01)
    monkeypatch.setattr("hetrl.replicas.LATE_SECONDS", 0.05)
    answered = 0

    async def once(request: wire.Generate) -> wire.Message:
        nonlocal answered
        answered += 1
        return await (at_once if answered == 1 else never)(request)

    alone, _ = drawn(Members({"a": at_once}), ["a"])
    members = Members({"a": at_once, "b": once})
    found, lost = drawn(members, ["a", "b"])
    assert [one.sample for one in found] == [one.sample for one in alone]
    assert not lost
    hung = [asked.draw for name, asked in members.asked if name == "b"][1:]
    assert [(to, message.draw) for to, message in members.told] == [("b", draw) for draw in hung]


def test_who_waits_for_its_turn_is_neither_late_nor_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Generation stands still, and its clock with it, until all that hangs would long have been drawn elsewhere."""
    monkeypatch.setattr(module, "TICK_SECONDS", 0.01)
    monkeypatch.setattr("hetrl.replicas.LATE_SECONDS", 0.05)
    answered, age = 0, 1.0

    async def stands(request: wire.Generate) -> wire.Message:
        nonlocal answered, age
        answered, age = answered + 1, age + 0.001
        await asyncio.sleep(0.3 if answered == 4 else 0.0)
        reply = continuation(request)
        assert isinstance(reply, wire.Generated)
        return wire.Generated(samples=reply.samples, seconds=1000.0)

    members = Members({"a": stands, "b": stands})
    dispatch = Dispatch({name: Capacity(2, 2) for name in "ab"}, LONGEST, STRETCH)

    async def run() -> None:
        draws = Draws(cast(Member, members), dispatch, lambda name, error: None, Timeline(), lambda: age)
        await asyncio.wait_for(draws.group([request_of(k) for k in range(6)], 0), 20.0)

    asyncio.run(run())
    assert members.told == []
    assert all(0.0 < one.seconds < 1.0 for one in dispatch._replicas.values())


def test_the_run_ends_with_the_last_replica() -> None:
    with pytest.raises(HetrlError, match="no replica is left to draw samples; the last one: the server ended"):
        drawn(Members({"a": dies, "b": dies}), ["a", "b"])


def test_the_run_ends_with_the_last_replica_though_nothing_is_drawn_when_it_is_lost() -> None:
    """As in mode sync, while a batch is trained; unless one is back by the time that the next one is drawn."""

    async def run(*, back: bool) -> None:
        dispatch = Dispatch({name: Capacity(2, 2) for name in "ab"}, LONGEST, STRETCH)
        members = Members(dict.fromkeys("ab", at_once))
        draws = Draws(cast(Member, members), dispatch, lambda name, error: None, Timeline())
        for name in "ab":
            draws.lost(name, HetrlError("its node is down"))
        if back:
            draws.back("a")
            draws.served("a")
        await asyncio.wait_for(draws.group([request_of(k) for k in range(6)], 0), 20.0)

    asyncio.run(run(back=True))
    with pytest.raises(HetrlError, match="no replica is left to draw samples; the last one: its node is down"):
        asyncio.run(run(back=False))


def test_a_stretch_that_every_replica_refuses_ends_the_run_before_all_are_lost() -> None:
    async def refuses(request: wire.Generate) -> wire.Message:
        if request.sampling.seed == request_of(1).seed(0):
            raise HetrlError("400: no such token")
        return await at_once(request)

    names = [f"r{number}" for number in range(8)]
    with pytest.raises(HetrlError, match="400: no such token"):
        drawn(Members(dict.fromkeys(names, refuses)), names)


def test_the_end_of_the_run_is_heard() -> None:
    async def aborted(request: wire.Generate) -> wire.Message:
        raise RunAborted("the controller ends it")

    with pytest.raises(RunAborted, match="the controller ends it"):
        drawn(Members({"a": aborted, "b": never}), ["a", "b"])


def test_a_defect_is_raised_and_not_waited_for() -> None:
    async def broken(request: wire.Generate) -> wire.Message:
        raise KeyError("defect")

    with pytest.raises(KeyError, match="defect"):
        drawn(Members({"a": broken}), ["a"])


def test_groups_that_are_given_up_are_withdrawn() -> None:
    members = Members({"a": never})

    async def run() -> None:
        dispatch = Dispatch({"a": Capacity(2, 2)}, LONGEST, STRETCH)
        draws = Draws(cast(Member, members), dispatch, lambda name, error: None, Timeline())
        group = asyncio.ensure_future(draws.group([request_of(k) for k in range(3)], 0))
        await asyncio.sleep(0.01)
        group.cancel()
        await asyncio.gather(group, return_exceptions=True)
        await asyncio.sleep(0.01)

    asyncio.run(run())
    assert [message.draw for _, message in members.told] == [asked.draw for _, asked in members.asked]
    assert len(members.told) == 2
