"""Turns on shared devices, with members in place that note what they are told."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, strategies as st

from hetrl.errors import HetrlError
from hetrl.runtime import wire
from hetrl.runtime.rl.turns import Party, Turns
from hetrl.runtime.transport.member import Member
from hetrl.workload import ACTOR_GENERATION, ACTOR_TRAINING, REFERENCE_INFERENCE

ADDRESSES = {
    ACTOR_GENERATION: ("a/actor_generation/0", "b/actor_generation/1"),
    REFERENCE_INFERENCE: ("a/reference_inference/0",),
    ACTOR_TRAINING: ("a/actor_training/0",),
}
TASK_OF = {address: task for task, addresses in ADDRESSES.items() for address in addresses}
ALL = (ACTOR_GENERATION, REFERENCE_INFERENCE, ACTOR_TRAINING)


class Members:
    """Answer after a while, and note who is awake; two tasks of a group never are."""

    def __init__(self, groups: Sequence[Sequence[str]], refuses: str = "") -> None:
        self.told: list[tuple[str, wire.Message]] = []
        self.awake: set[str] = set()
        self._groups, self._refuses = groups, refuses

    def refuse(self, address: str) -> None:
        self._refuses = address

    async def request(self, to: str, message: Any, **_: Any) -> Any:
        self.told.append((to, message))
        await asyncio.sleep(0)
        if to == self._refuses:
            raise HetrlError(f"{to} failed")
        if isinstance(message, wire.Wake):
            self.awake.add(to)
        else:
            self.awake.discard(to)
        for group in self._groups:
            assert len({TASK_OF[one] for one in self.awake} & set(group)) <= 1
        return SimpleNamespace(message=wire.Done())

    def awake_now(self, task: str) -> bool:
        return set(ADDRESSES[task]) <= self.awake

    def tasks_told(self, kind: type[wire.Message]) -> list[str]:
        """Return the tasks that were told so, in order, each once per time."""
        first = {addresses[0] for addresses in ADDRESSES.values()}
        return [TASK_OF[to] for to, message in self.told if isinstance(message, kind) and to in first]


def turns_of(*groups: Sequence[str], sync: bool = True, refuses: str = "") -> tuple[Turns, Members]:
    members = Members(groups, refuses)
    parties = [{task: Party(ADDRESSES[task], "offload") for task in group} for group in groups]
    return Turns(cast(Member, members), parties, new_weights=sync), members


async def seen(_: str) -> None:
    await asyncio.sleep(0)


def test_tasks_that_are_alone_are_told_nothing() -> None:
    async def run() -> None:
        turns, members = turns_of()
        await turns.start(seen, 1.0)
        async with turns.of(ACTOR_TRAINING), turns.prompt():
            pass
        assert members.told == []

    asyncio.run(run())


def test_each_starts_when_the_one_before_sleeps() -> None:
    async def run() -> None:
        turns, members = turns_of((ACTOR_TRAINING, ACTOR_GENERATION, REFERENCE_INFERENCE))
        await turns.start(seen, 1.0)
        assert members.tasks_told(wire.Wake) == members.tasks_told(wire.Sleep) == list(ALL)
        assert members.awake == set()

    asyncio.run(run())


def test_nobody_is_woken_before_it_is_there() -> None:
    async def run() -> None:
        turns, members = turns_of(ALL)
        there = asyncio.Event()
        starting = asyncio.ensure_future(turns.start(lambda _: there.wait(), 1.0))  # type: ignore[arg-type,return-value]
        await asyncio.sleep(0.01)
        assert members.told == []
        there.set()
        await starting

    asyncio.run(run())


def test_the_clock_of_generation_stands_still_while_it_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("hetrl.runtime.rl.turns.time.monotonic", lambda: now)

    async def run() -> None:
        nonlocal now
        turns, _ = turns_of((ACTOR_GENERATION, REFERENCE_INFERENCE))
        await turns.start(seen, 1.0)
        async with turns.prompt():
            began = turns.generating()
            now += 7.0
            assert turns.generating() == began + 7.0
            async with turns.of(REFERENCE_INFERENCE, 1):
                now += 50.0
                assert turns.generating() == began + 7.0
            now += 3.0
            assert turns.generating() == began + 10.0

    asyncio.run(run())


def test_a_training_comes_after_those_of_its_group_that_infer_whoever_asks_first() -> None:
    async def run() -> None:
        turns, members = turns_of((REFERENCE_INFERENCE, ACTOR_TRAINING))
        order = []

        async def have(task: str, batch: int) -> None:
            async with turns.of(task, batch):
                order.append((task, batch))

        first = [asyncio.ensure_future(have(ACTOR_TRAINING, batch)) for batch in (1, 2)]
        await asyncio.sleep(0.01)
        assert not order and not members.told
        await asyncio.gather(*first, *(have(REFERENCE_INFERENCE, batch) for batch in (1, 2)))
        assert order == [(task, batch) for batch in (1, 2) for task in (REFERENCE_INFERENCE, ACTOR_TRAINING)]

    asyncio.run(run())


def test_who_works_for_no_batch_stays_awake_until_another_one_asks() -> None:
    async def run() -> None:
        turns, members = turns_of((REFERENCE_INFERENCE, ACTOR_TRAINING))
        for _ in range(3):
            async with turns.of(ACTOR_TRAINING):
                assert members.awake_now(ACTOR_TRAINING)
        assert members.tasks_told(wire.Wake) == [ACTOR_TRAINING]
        async with turns.of(REFERENCE_INFERENCE):
            assert members.awake_now(REFERENCE_INFERENCE)
        assert members.tasks_told(wire.Sleep) == [ACTOR_TRAINING]

    asyncio.run(run())


def test_who_had_its_turn_of_a_batch_sleeps_before_another_one_asks() -> None:
    async def run() -> None:
        turns, members = turns_of((REFERENCE_INFERENCE, ACTOR_TRAINING))
        for task in (REFERENCE_INFERENCE, ACTOR_TRAINING):
            async with turns.of(task, 1):
                assert members.awake_now(task)
            await turns.settled()
            assert not members.awake
        assert members.tasks_told(wire.Sleep) == [REFERENCE_INFERENCE, ACTOR_TRAINING]

    asyncio.run(run())


def test_who_has_the_next_turn_too_stays_awake() -> None:
    async def run() -> None:
        turns, members = turns_of((ACTOR_GENERATION, ACTOR_TRAINING), sync=False)

        async def take(batch: int) -> None:
            async with turns.of(ACTOR_TRAINING, batch):
                await asyncio.sleep(0.01)
                assert members.tasks_told(wire.Sleep) == []

        await asyncio.gather(take(1), take(2))
        await turns.settled()
        assert members.tasks_told(wire.Sleep) == [ACTOR_TRAINING]

    asyncio.run(run())


@pytest.mark.parametrize("asked", [True, False])
def test_a_member_that_does_not_sleep_is_heard_of(asked: bool) -> None:
    """By the next one that asks, else at the end."""

    async def run() -> None:
        turns, members = turns_of((REFERENCE_INFERENCE, ACTOR_TRAINING))
        async with turns.of(REFERENCE_INFERENCE, 1):
            members.refuse(ADDRESSES[REFERENCE_INFERENCE][0])
        await asyncio.sleep(0.01)
        with pytest.raises(HetrlError, match="reference_inference/0 failed"):
            if asked:
                async with turns.of(ACTOR_TRAINING, 1):
                    raise AssertionError("it has no devices")
            await turns.settled()

    asyncio.run(run())


def test_generation_is_stopped_and_goes_on_after_the_last_task() -> None:
    """Asynchronous: a prompt is under way through the whole iteration."""

    async def run() -> None:
        turns, members = turns_of(ALL, sync=False)
        answered = asyncio.Event()

        async def draw() -> None:
            async with turns.prompt():
                assert members.awake_now(ACTOR_GENERATION)
                await answered.wait()

        drawing = asyncio.ensure_future(draw())
        await asyncio.sleep(0.01)
        async with turns.of(REFERENCE_INFERENCE, 1):
            assert not members.awake_now(ACTOR_GENERATION)
        late = asyncio.ensure_future(draw())
        await asyncio.sleep(0.01)
        assert members.awake == set()  # not in between
        async with turns.of(ACTOR_TRAINING, 1):
            pass
        assert members.awake_now(ACTOR_GENERATION)  # the last one of its group
        answered.set()
        await asyncio.gather(drawing, late)
        assert members.tasks_told(wire.Wake) == [
            ACTOR_GENERATION,
            REFERENCE_INFERENCE,
            ACTOR_TRAINING,
            ACTOR_GENERATION,
        ]

    asyncio.run(run())


def test_generation_goes_on_behind_a_task_that_works_for_no_batch() -> None:
    """As when the first weights are sent, which is not the last task of a batch."""

    async def run() -> None:
        turns, members = turns_of(ALL, sync=False)
        async with turns.of(REFERENCE_INFERENCE):
            pass
        async with asyncio.timeout(5.0), turns.prompt():
            assert members.awake_now(ACTOR_GENERATION)

    asyncio.run(run())


def test_a_group_takes_all_tasks_of_a_batch_before_those_of_the_next() -> None:
    """The next batch's first task is asked for before this one's last."""

    async def run() -> None:
        turns, _ = turns_of(ALL, sync=False)
        had: list[tuple[str, int]] = []

        async def take(task: str, batch: int) -> None:
            async with turns.of(task, batch):
                had.append((task, batch))

        asked = [take(REFERENCE_INFERENCE, 2), take(REFERENCE_INFERENCE, 1)]
        waiting = [asyncio.ensure_future(one) for one in asked]
        async with asyncio.timeout(20.0):
            while not had:
                await asyncio.sleep(0.001)
            assert had == [(REFERENCE_INFERENCE, 1)]
            await asyncio.gather(take(ACTOR_TRAINING, 2), take(ACTOR_TRAINING, 1), *waiting)
        assert [batch for _, batch in had] == [1, 1, 2, 2]

    asyncio.run(run())


def test_generation_is_not_woken_where_the_next_batch_waits_for_the_devices() -> None:
    async def run() -> None:
        turns, members = turns_of(ALL, sync=False)

        async def take(task: str, batch: int) -> None:
            async with turns.of(task, batch):
                pass

        async with turns.prompt():
            await take(REFERENCE_INFERENCE, 1)
            following = [asyncio.ensure_future(take(task, 2)) for task in (REFERENCE_INFERENCE, ACTOR_TRAINING)]
            await asyncio.sleep(0.01)
            await take(ACTOR_TRAINING, 1)
            await asyncio.gather(*following)
            assert members.awake_now(ACTOR_GENERATION)
        woken = members.tasks_told(wire.Wake)
        assert woken.count(ACTOR_GENERATION) == 2  # for the prompt, and behind both batches

    asyncio.run(run())


def test_generation_without_prompts_sleeps_on() -> None:
    async def run() -> None:
        turns, members = turns_of(ALL)
        async with turns.of(ACTOR_TRAINING):
            pass
        assert not members.awake_now(ACTOR_GENERATION)
        async with turns.prompt():
            assert members.awake_now(ACTOR_GENERATION)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("group", "sync", "keeps"),
    [
        (ALL, True, False),
        (ALL, False, True),
        ((ACTOR_GENERATION, REFERENCE_INFERENCE), True, False),
        ((ACTOR_GENERATION, REFERENCE_INFERENCE), False, True),
    ],
)
def test_generation_keeps_its_weights_where_it_goes_on_with_them(group: Sequence[str], sync: bool, keeps: bool) -> None:
    async def run() -> None:
        turns, members = turns_of(group, sync=sync)
        async with turns.prompt():
            pass
        async with turns.of(group[-1]):
            pass
        (sleep,) = {message for _, message in members.told if isinstance(message, wire.Sleep)}
        assert sleep == wire.Sleep(idle_state="offload", keep_weights=keeps)

    asyncio.run(run())


def test_a_member_that_does_not_wake_ends_the_turn() -> None:
    async def run() -> None:
        turns, _ = turns_of(ALL, refuses=ADDRESSES[ACTOR_TRAINING][0])
        with pytest.raises(HetrlError, match="actor_training/0 failed"):
            async with turns.of(ACTOR_TRAINING):
                raise AssertionError("it has no devices")

    asyncio.run(run())


@given(
    st.sampled_from([(ALL,), (ALL[:2],), (ALL[1:],), ((ALL[0], ALL[2]),)]),
    st.lists(st.sampled_from([ACTOR_GENERATION, "iteration"]), min_size=1, max_size=12),
    st.lists(st.integers(0, 5), min_size=48, max_size=48),
)
def test_work_is_done_by_who_is_awake(groups: Sequence[Sequence[str]], works: Sequence[str], pauses: list[int]) -> None:
    """Whatever comes together: tasks of batches, prompts any time; `Members` sees that none overlap."""

    async def run() -> None:
        turns, members = turns_of(*groups, sync=False)
        shared = {task for group in groups for task in group}
        lengths = iter(pauses)

        async def pause() -> None:
            for _ in range(next(lengths)):
                await asyncio.sleep(0)

        async def draw() -> None:
            async with turns.prompt():
                assert ACTOR_GENERATION not in shared or members.awake_now(ACTOR_GENERATION)
                await pause()

        async def take(task: str, batch: int) -> None:
            async with turns.of(task, batch):
                await pause()
                assert task not in shared or members.awake_now(task)

        drawing, working, batch = [], [], 0
        for work in works:
            if work == ACTOR_GENERATION:
                drawing.append(asyncio.ensure_future(draw()))
                continue
            batch += 1
            working += [asyncio.ensure_future(take(task, batch)) for task in (REFERENCE_INFERENCE, ACTOR_TRAINING)]
            await pause()
        async with asyncio.timeout(5.0):
            await asyncio.gather(*drawing, *working)

    asyncio.run(run())


def test_a_member_that_is_lost_is_told_nothing_more() -> None:
    async def run() -> None:
        turns, members = turns_of(ALL, refuses=ADDRESSES[ACTOR_GENERATION][1])
        turns.forget(ADDRESSES[ACTOR_GENERATION][1])
        async with turns.prompt():
            assert members.awake == {ADDRESSES[ACTOR_GENERATION][0]}
        async with turns.of(REFERENCE_INFERENCE, 1):
            assert members.awake == set(ADDRESSES[REFERENCE_INFERENCE])
        assert ADDRESSES[ACTOR_GENERATION][1] not in {to for to, _ in members.told}

    asyncio.run(run())


def test_a_member_that_is_lost_while_it_is_to_sleep_is_waited_for_no_longer() -> None:
    """It hangs; but who gives up waiting for a turn still hears of that."""
    hanging = ADDRESSES[ACTOR_GENERATION][1]

    class Hanging(Members):
        async def request(self, to: str, message: Any, **more: Any) -> Any:
            if to == hanging and isinstance(message, wire.Sleep):
                self.awake.discard(to)
                await asyncio.Event().wait()
            return await super().request(to, message, **more)

    async def run(lost: bool) -> None:
        members = Hanging([ALL])
        parties = {task: Party(ADDRESSES[task], "offload") for task in ALL}
        turns = Turns(cast(Member, members), [parties], new_weights=True)
        async with turns.prompt():
            pass

        async def score() -> None:
            async with turns.of(REFERENCE_INFERENCE, 1):
                assert members.awake == set(ADDRESSES[REFERENCE_INFERENCE])

        scoring = asyncio.ensure_future(score())
        done, _ = await asyncio.wait([scoring], timeout=0.1)
        assert not done
        if lost:
            turns.forget(hanging)
            await asyncio.wait_for(scoring, 10)
            return
        scoring.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(scoring, 10)

    asyncio.run(run(lost=True))
    asyncio.run(run(lost=False))
