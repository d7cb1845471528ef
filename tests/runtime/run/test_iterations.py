"""The steps of a run over any grouping of the six tasks, with everybody's answers in their place.

Answers take a random while. `World` sees that who works has its devices alone, that a group does all of a step before
the next one, and that values are of one version.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections import defaultdict
from collections.abc import Mapping, Sequence
from types import MappingProxyType, SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import yaml
from hypothesis import given, settings, strategies as st

from hetrl.describe.experiment import Experiment
from hetrl.errors import HetrlError, TimeUpError
from hetrl.plan.plan import Group
from hetrl.runtime import wire
from hetrl.runtime.checkpoints.files import newest_step
from hetrl.runtime.data.prompts import Prompt
from hetrl.runtime.rl.feed import Draw, Feed, Position
from hetrl.runtime.rl.learner import Learner, Tasks, Versions
from hetrl.runtime.rl.sampling import PromptGroup
from hetrl.runtime.rl.stretches import Stretch
from hetrl.runtime.rl.tasks import Inference, Trainer
from hetrl.runtime.rl.timeline import Span
from hetrl.runtime.rl.turns import Party, Turns
from hetrl.runtime.run.iterations import Iterations, PublishVersion
from hetrl.runtime.transport.member import Member
from hetrl.runtime.wire.arrays import pack, unpack
from hetrl.workload import (
    ACTOR_GENERATION,
    ACTOR_TRAINING,
    CRITIC_INFERENCE,
    CRITIC_TRAINING,
    REFERENCE_INFERENCE,
    REWARD_INFERENCE,
    TASKS,
)
from lab.quickstart import QUICKSTART

SITE, BATCH, STEPS = "a", 2, 5
KEYS = yaml.safe_load(QUICKSTART.read_text())


def address(task: str) -> str:
    return f"{SITE}/{task}/0"


def task_of(to: str) -> str:
    return to.split("/")[1]


class World:
    """Every other member of a run; `fails` names who answers its third request of work with an error."""

    def __init__(self, groups: Sequence[Sequence[str]], seed: int, fails: str = "") -> None:
        self.groups, self.fails, self.random = groups, fails, random.Random(seed)
        self.awake: set[str] = {task for group in groups if len(group) == 1 for task in group}
        self.newest: dict[int, int] = {}  # the step that each group works for
        self.critic_version, self.works = 0, dict.fromkeys(TASKS, 0)
        self.sending = dict[str, int]()  # versions that are under way
        self.served = 1  # by generation
        self.sending_pauses = self.random.choice((1, 50))

    def begins(self, iterations: Iterations, record: Rows) -> None:
        """Be told who takes the steps, and where they are noted."""

    def draws(self, number: int) -> None:
        """Be told that generation begins with a prompt."""

    async def pause(self) -> None:
        for _ in range(self.random.randrange(8)):
            await asyncio.sleep(0)

    async def request(self, to: str, message: Any, buffers: Any = (), **_: Any) -> Any:
        task = task_of(to)
        await self.pause()
        if isinstance(message, (wire.Wake, wire.Sleep)):
            self._turn(task, wakes=isinstance(message, wire.Wake))
            return SimpleNamespace(message=wire.Done(), buffers=())
        if isinstance(message, wire.FinishPublish):  # without the devices
            return SimpleNamespace(message=await self._published(task, message.version), buffers=())
        assert task in self.awake, f"{task} works and does not have its devices"
        self.works[task] += 1
        if isinstance(message, (wire.Score, wire.Train)):
            self._in_order(task, message.step)
        if task == self.fails and self.works[task] >= 3:
            raise HetrlError(f"{task} is broken")
        answer, sent = await self._work(task, message, list(buffers))
        assert task in self.awake, f"{task} lost its devices while it worked"
        return SimpleNamespace(message=answer, buffers=sent)

    def _in_order(self, task: str, step: int) -> None:
        (number,) = (number for number, group in enumerate(self.groups) if task in group)
        assert step >= self.newest.get(number, 0), f"{task} works for step {step} behind {self.newest[number]}"
        self.newest[number] = step

    async def _published(self, task: str, version: int) -> wire.Published:
        assert self.sending[task] == version
        for _ in range(self.sending_pauses):
            await self.pause()
        if task == CRITIC_TRAINING:
            self.critic_version = version
            await self.pause()
        del self.sending[task]
        return wire.Published(version=version, digest="", bytes=1, seconds=0.0, apply_seconds={})

    def _turn(self, task: str, wakes: bool) -> None:
        (group,) = (group for group in self.groups if task in group)
        if wakes:
            assert not self.awake & {*group}, f"{task} wakes beside {self.awake & {*group}}"
            self.awake.add(task)
        else:
            self.awake.remove(task)

    async def _work(self, task: str, message: Any, buffers: list[Any]) -> tuple[Any, Sequence[memoryview]]:
        version = self.critic_version if task == CRITIC_INFERENCE else 0
        await self.pause()
        match message:
            case wire.Score():
                arrays = unpack(message.arrays, buffers)
                specs, scores = pack({"scores": np.full(arrays["tokens"].shape, -0.5, np.float32)})
                return wire.Scored(step=1, arrays=specs, seconds=0.0, version=version), scores
            case wire.Train():
                return wire.Trained(step=1, metrics={"loss": 1.0}, seconds=0.0), ()
            case wire.Publish():
                assert task not in self.sending, f"{task} exports a version while another one is under way"
                self.sending[task] = message.version
                return wire.Exported(version=message.version), ()
            case wire.Save() | wire.FinishSave():
                whole = isinstance(message, wire.FinishSave)
                return wire.Saved(step=message.step, directory="", seconds=0.0, whole=whole), ()
        raise AssertionError(message)


class Rows:
    """Keeps the rows of metrics, in the place of the record."""

    def __init__(self) -> None:
        self.rows: list[Mapping[str, Any]] = []
        self.events = self
        self.told: list[Mapping[str, Any]] = []

    def append(self, kind: str, **fields: Any) -> None:
        self.told.append({"kind": kind, **fields})

    def step(self, row: Mapping[str, Any], of: int) -> None:
        self.rows.append(row)

    def saved(self, *_: object) -> None:
        """Note nothing."""

    def refused(self, *_: object) -> None:
        """Note nothing."""


class Nothing:
    """Stands for sample files and for the meter of links."""

    offences: Mapping[str, Any] = {}

    def write(self, *_: object) -> None:
        """Write nothing."""

    async def read(self, _: int) -> dict[str, Any]:
        return {}


def experiment_of(staleness: int | None, warmup: int, kl_in: str, checkpoints: Mapping[str, int]) -> Experiment:
    mode = {"mode": "sync"} if staleness is None else {"mode": "async", "max_staleness": staleness}
    loss = {"kl_coefficient": 0.1, "kl_in": kl_in, "minibatches": 2}
    algorithm = {"kind": "ppo", "samples_per_prompt": 1, **loss, **mode}
    return Experiment.model_validate(
        {
            **KEYS,
            "algorithm": algorithm,
            "reward": {"kind": "both", "architecture": "tiny-qwen3", "weights": "/r"},
            "critic": {"warmup_steps": warmup},
            "batch": {"samples": BATCH, "prompt_tokens": 4, "response_tokens": 3},
            "steps": STEPS,
            "checkpoints": checkpoints,
        }
    )


def tasks_of(member: Member) -> Tasks:
    return Tasks(
        actor=Trainer(member, ACTOR_TRAINING, address(ACTOR_TRAINING), ()),
        old=Inference(member, ACTOR_TRAINING, {address(ACTOR_TRAINING): 1}),
        reference=Inference(member, REFERENCE_INFERENCE, {address(REFERENCE_INFERENCE): 1}),
        reward=Inference(member, REWARD_INFERENCE, {address(REWARD_INFERENCE): 1}, "rewards"),
        values=Inference(member, CRITIC_INFERENCE, {address(CRITIC_INFERENCE): 1}, "values"),
        critic=Trainer(member, CRITIC_TRAINING, address(CRITIC_TRAINING), ()),
    )


def drawing(world: World, turns: Turns) -> Draw:
    """Return what draws a prompt's sample under the version that is served when it begins."""

    async def draw(number: int) -> PromptGroup:
        async with turns.prompt():
            began = world.served
            world.draws(number)
            await world.pause()
            spans = (wire.VersionSpan(version=began, start=0, end=2),)
            drawn = wire.Sample(tokens=(7, 1), logprobs=(-0.5, -0.5), versions=spans, finish_reason="stop")
            stretches = ((Stretch("a/actor_generation/0", 2, 0.0, 1.0),),)
            prompt = Prompt(str(number), "")
            return PromptGroup(prompt, (5,), (drawn,), (1.0,), rule_rewards=(1.0,), stretches=stretches)

    return draw


def publishing(world: World, actor: Trainer, versions: Versions) -> PublishVersion:
    """Return what serves the actor's weights as the next version."""

    async def publish(left: asyncio.Event) -> wire.Published:
        versions.actor = version = versions.actor + 1
        await actor.export(version)
        left.set()
        published = await actor.published(version)
        world.served = version
        return published

    return publish


async def run(
    world: World,
    staleness: int | None,
    warmup: int,
    samples: Any = None,
    kl_in: str = "loss",
    taken: int = 0,
    warmed: int = 0,
    checkpoints: Mapping[str, int] = MappingProxyType({"every_steps": 2}),
) -> list[Mapping[str, Any]]:
    """Take all steps behind those that were `taken` by another run, `warmed` of them critic alone; return the rows."""
    experiment, member = experiment_of(staleness, warmup, kl_in, checkpoints), cast(Member, world)
    shared = [{task: Party((address(task),), "offload") for task in group} for group in world.groups if len(group) > 1]
    turns, tasks = Turns(member, shared, new_weights=staleness is None), tasks_of(member)
    models = experiment.reward, experiment.critic
    learner = Learner(tasks, turns, experiment.algorithm, 0, *models, judged_text=lambda *texts: (*texts[-1],))
    versions, record = Versions(actor=1 + taken - warmed, critic=taken), Rows()
    world.critic_version, world.served = versions.critic, versions.actor
    turns.begin_with(taken + 1)
    start = Position(taken, taken * BATCH)
    feed = Feed(drawing(world, turns), BATCH, staleness or 0, STEPS, versions.actor, start=start)
    nothing: Any = Nothing()
    try:
        groups, publish = [Group(tuple(group), ()) for group in world.groups], publishing(world, tasks.actor, versions)
        files = samples or nothing
        iterations = Iterations(experiment, learner, versions, publish, cast(Any, record), files, nothing, groups)
        world.begins(iterations, record)
        await iterations.run(feed)
    finally:
        await feed.close()
    return record.rows


def groups_of(owners: Sequence[int]) -> list[list[str]]:
    """Return the tasks of each group."""
    found = [[task for task, owner in zip(TASKS, owners, strict=True) if owner == group] for group in range(6)]
    return [group for group in found if group]


SEEDS = st.integers(0, 99)
GROUPINGS = st.lists(st.integers(0, 5), min_size=6, max_size=6).map(groups_of)


@settings(max_examples=60, deadline=None)
@given(
    GROUPINGS,
    st.one_of(st.none(), st.integers(0, 4)),
    st.integers(0, 2),
    st.integers(0, 2**16),
    st.sampled_from(["loss", "reward"]),
)
def test_all_steps_are_taken_in_every_grouping(
    groups: list[list[str]], staleness: int | None, warmup: int, seed: int, kl_in: str
) -> None:
    async def scenario() -> list[Mapping[str, Any]]:
        async with asyncio.timeout(20.0):
            return await run(World(groups, seed), staleness, warmup, kl_in=kl_in)

    rows, most = asyncio.run(scenario()), staleness or 0
    assert [row["step"] for row in rows] == [*range(1, STEPS + 1)]
    assert [row["weight_version"] for row in rows] == [1 + max(0, step - warmup) for step in range(STEPS)]
    assert [row["weight_bytes"] > 0 for row in rows] == [step > warmup for step in range(1, STEPS + 1)]
    for row in rows:
        assert 0 <= row["staleness"] <= most
        assert row["step"] - 1 - most <= row["critic_version"] <= row["step"] - 1
        for names, waits in zip(groups, row["waits"], strict=True):
            busy = [(start, end) for task, start, end in row["spans"] if Span(task, start, end).owner in names]
            longest = max((end - start for start, end in busy), default=0.0)
            idle = sum(waits.values())
            assert idle <= row["seconds"]["iteration"] - longest + 0.001
            assert idle >= row["seconds"]["iteration"] - sum(end - start for start, end in busy) - 0.001


@pytest.mark.parametrize("staleness", [None, 1])
@pytest.mark.parametrize("owners", [(0, 1, 2, 3, 4, 5), (0, 1, 2, 3, 1, 3), (0, 1, 2, 3, 0, 3)])
def test_the_trainer_scores_a_batch_while_others_do_but_does_not_keep_generation_waiting_for_them(
    owners: tuple[int, ...], staleness: int | None
) -> None:
    class Slow(World):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self.valued = set[int]()
            self.scored: dict[int, bool] = {}  # by step, whether its values were there

        async def _work(self, task: str, message: Any, buffers: list[Any]) -> tuple[Any, Sequence[memoryview]]:
            if task == CRITIC_INFERENCE:
                for _ in range(500):
                    await asyncio.sleep(0)
                self.valued.add(message.step)
            elif task == ACTOR_TRAINING and isinstance(message, wire.Score):
                self.scored[message.step] = message.step in self.valued
            return await super()._work(task, message, buffers)

    async def scenario() -> list[bool]:
        async with asyncio.timeout(20.0):
            world = Slow(groups_of(owners), 0)
            await run(world, staleness, 0)
        return [world.scored[step] for step in range(1, STEPS + 1)]

    generates = owners[0] == owners[4]
    assert asyncio.run(scenario()) == [bool(staleness) and generates] * STEPS


@pytest.mark.parametrize("staleness", [None, 1])
@pytest.mark.parametrize("warmup", [0, 1])
def test_generation_goes_on_while_the_critic_still_trains(warmup: int, staleness: int | None) -> None:
    class Slow(World):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self.drawn = asyncio.Condition()
            self.told = set[asyncio.Task[None]]()
            self.most = 0  # prompts that generation has begun with

        def draws(self, number: int) -> None:
            self.told.add(asyncio.ensure_future(self._drew(number + 1)))

        async def _drew(self, prompts: int) -> None:
            async with self.drawn:
                self.most = max(self.most, prompts)
                self.drawn.notify_all()

        async def _work(self, task: str, message: Any, buffers: list[Any]) -> tuple[Any, Sequence[memoryview]]:
            if task == CRITIC_TRAINING and isinstance(message, wire.Train):
                # of the next batch, and in mode async of one more: those behind it wait for this step's version
                wanted = min(message.step + 1 + (staleness or 0), STEPS) * BATCH
                async with self.drawn:
                    await self.drawn.wait_for(lambda: self.most >= wanted)
            return await super()._work(task, message, buffers)

    async def scenario() -> list[Mapping[str, Any]]:
        async with asyncio.timeout(20.0):
            return await run(Slow(groups_of((0, 1, 2, 3, 4, 5)), 0), staleness, warmup)

    assert len(asyncio.run(scenario())) == STEPS


@pytest.mark.parametrize("staleness", [None, 1])
@pytest.mark.parametrize("kl_in", ["loss", "reward"])
@pytest.mark.parametrize("owners", [(0, 1, 2, 3, 4, 5), (0, 1, 2, 3, 0, 3)])
def test_the_critic_waits_for_the_trainers_scores_if_they_are_in_the_rewards(
    owners: tuple[int, ...], kl_in: str, staleness: int | None
) -> None:
    class Slow(World):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self.scored = set[int]()
            self.waited: dict[int, bool] = {}  # by step, whether the critic's training did
            self.trains = defaultdict[int, asyncio.Event](asyncio.Event)  # the critic, by step

        async def _work(self, task: str, message: Any, buffers: list[Any]) -> tuple[Any, Sequence[memoryview]]:
            if task == ACTOR_TRAINING and isinstance(message, wire.Score):
                if kl_in == "loss":
                    await self.trains[message.step].wait()  # for ever, where the critic waits for the scores
                for _ in range(2000):
                    await asyncio.sleep(0)
                self.scored.add(message.step)
            elif task == CRITIC_TRAINING and isinstance(message, wire.Train):
                self.waited.setdefault(message.step, message.step in self.scored)
                self.trains[message.step].set()
            return await super()._work(task, message, buffers)

    async def scenario() -> list[bool]:
        async with asyncio.timeout(20.0):
            world = Slow(groups_of(owners), 0)
            await run(world, staleness, 0, kl_in=kl_in)
        return [world.waited[step] for step in range(1, STEPS + 1)]

    assert asyncio.run(scenario()) == [kl_in == "reward"] * STEPS


def test_the_controller_goes_on_while_samples_are_written() -> None:
    class Slow:
        def __init__(self) -> None:
            self.loop, self.steps = asyncio.get_running_loop(), list[int]()

        def write(self, step: int, _: object) -> None:
            went_on = threading.Event()
            self.loop.call_soon_threadsafe(went_on.set)
            assert went_on.wait(10), "the event loop stands still"
            self.steps.append(step)

    async def scenario() -> list[int]:
        files = Slow()
        await run(World(groups_of(range(6)), 0), 1, 0, files)
        return files.steps

    assert asyncio.run(scenario()) == [*range(1, STEPS + 1)]


@pytest.mark.parametrize("staleness", [None, 1, 2])
def test_the_next_step_is_trained_while_a_version_travels(staleness: int | None) -> None:
    """In mode sync there is nothing to train on; in mode async as much as staleness allows."""

    class Slow(World):
        most_ahead = trained = 0

        async def _published(self, task: str, version: int) -> wire.Published:
            if task == ACTOR_TRAINING and version == 2:
                for _ in range(2000):
                    await asyncio.sleep(0)
                self.most_ahead = self.trained - (version - 1)
            return await super()._published(task, version)

        def _in_order(self, task: str, step: int) -> None:
            super()._in_order(task, step)
            self.trained = max(self.trained, step if task == ACTOR_TRAINING else 0)

    async def scenario() -> int:
        async with asyncio.timeout(20.0):
            world = Slow(groups_of(range(6)), 0)
            await run(world, staleness, 0)
        return world.most_ahead

    assert asyncio.run(scenario()) == min(staleness or 0, 1)


@settings(max_examples=40, deadline=None)
@given(GROUPINGS, st.one_of(st.none(), st.integers(0, 4)), st.integers(0, 2), st.integers(1, STEPS), st.integers(0, 99))
def test_a_job_that_slurm_ends_keeps_the_step_under_way(
    groups: list[list[str]], staleness: int | None, warmup: int, trained: int, seed: int
) -> None:
    """It is said while the critic is trained on a batch; every second step has a checkpoint, and the last one."""

    class Ending(World):
        kept: dict[str, list[int]]

        def begins(self, iterations: Iterations, record: Rows) -> None:
            self.iterations, self.record, self.kept = iterations, record, {ACTOR_TRAINING: [], CRITIC_TRAINING: []}

        async def _work(self, task: str, message: Any, buffers: list[Any]) -> tuple[Any, Sequence[memoryview]]:
            if task == CRITIC_TRAINING and isinstance(message, wire.Train) and message.step == trained:
                for site in ("beta", "gamma", "beta"):
                    self.iterations.last.end_soon(site)
            elif isinstance(message, wire.FinishSave) and message.wait:
                self.kept[task].append(message.step)
            return await super()._work(task, message, buffers)

    async def scenario() -> tuple[Ending, str]:
        world = Ending(groups, seed)
        async with asyncio.timeout(20.0):
            try:
                await run(world, staleness, warmup)
            except TimeUpError as error:
                return world, str(error)
        return world, ""

    world, said = asyncio.run(scenario())
    last = [row["step"] for row in world.record.rows][-1]
    assert [row["step"] for row in world.record.rows] == [*range(1, last + 1)]
    assert world.kept[ACTOR_TRAINING][-1] == world.kept[CRITIC_TRAINING][-1] == last
    assert last - trained in (0, 1)
    told = [event for event in world.record.told if event["kind"] == "ending"]
    if last < STEPS:
        assert said.startswith(f"beta: Slurm ends its job; kept up to step {last} of {STEPS}")
        assert told == [{"kind": "ending", "site": "beta", "step": last}]
    else:
        assert not said and not told


@settings(max_examples=60, deadline=None)
@given(
    GROUPINGS, st.one_of(st.none(), st.integers(0, 4)), st.integers(1, 2), st.integers(1, 3), st.integers(0, 9), SEEDS
)
def test_there_is_a_step_that_actor_and_critic_both_have_a_checkpoint_of(
    groups: list[list[str]], staleness: int | None, keep: int, every: int, slow: int, seed: int
) -> None:
    """From the first one on, at any moment, whoever is slow to write; at most two more lie there than are kept."""

    class Disk(World):
        kept: Mapping[str, set[int]]

        async def _work(self, task: str, message: Any, buffers: list[Any]) -> tuple[Any, Sequence[memoryview]]:
            answer, sent = await super()._work(task, message, buffers)
            if isinstance(message, wire.FinishSave):
                if not message.wait and self.random.randrange(10) < slow:
                    return wire.Saved(step=message.step, directory="", seconds=0.0, whole=False), ()
                kept = self.kept[task] | {message.step}
                newest = sorted(kept)[-message.keep :]
                had = newest_step(self.kept)
                self.kept = {**self.kept, task: {step for step in kept if step in newest or step in message.spared}}
                assert had is None or newest_step(self.kept) is not None
                assert all(len(steps) <= message.keep + 2 for steps in self.kept.values())
            return answer, sent

    async def scenario() -> Disk:
        world = Disk(groups, seed)
        world.kept = {ACTOR_TRAINING: set(), CRITIC_TRAINING: set()}
        async with asyncio.timeout(20.0):
            await run(world, staleness, 0, checkpoints={"every_steps": every, "keep": keep})
        return world

    assert newest_step(asyncio.run(scenario()).kept) == STEPS


@pytest.mark.parametrize("before", [True, False])
def test_a_run_that_goes_on_and_is_ended_by_slurm_in_its_first_step_keeps_that(before: bool) -> None:
    """Also where that is said before it takes up its steps."""

    class Ending(World):
        def begins(self, iterations: Iterations, record: Rows) -> None:
            self.iterations, self.record, self.kept = iterations, record, list[tuple[str, int]]()
            if before:
                iterations.last.end_soon("beta")

        async def _work(self, task: str, message: Any, buffers: list[Any]) -> tuple[Any, Sequence[memoryview]]:
            if task == ACTOR_TRAINING and isinstance(message, wire.Train):
                self.iterations.last.end_soon("beta")
            elif isinstance(message, wire.FinishSave) and message.wait:
                self.kept.append((task, message.step))
            return await super()._work(task, message, buffers)

    async def scenario(world: Ending) -> None:
        async with asyncio.timeout(20.0):
            await run(world, 1, 0, taken=2)

    world = Ending(groups_of(range(6)), 0)
    with pytest.raises(TimeUpError, match=f"beta: Slurm ends its job; kept up to step 3 of {STEPS}"):
        asyncio.run(scenario(world))
    assert [row["step"] for row in world.record.rows] == [3]
    assert sorted(world.kept) == [(ACTOR_TRAINING, 3), (CRITIC_TRAINING, 3)]
    assert [event["step"] for event in world.record.told if event["kind"] == "ending"] == [3]


@pytest.mark.parametrize("task", [ACTOR_TRAINING, CRITIC_TRAINING])
def test_a_version_that_cannot_be_served_ends_the_run_beside_a_step_that_takes_for_ever(task: str) -> None:
    class Broken(World):
        async def _published(self, task_: str, version: int) -> wire.Published:
            if task_ == task and version >= 2:
                raise HetrlError(f"nobody takes the version of {task}")
            return await super()._published(task_, version)

        async def _work(self, task_: str, message: Any, buffers: list[Any]) -> tuple[Any, Sequence[memoryview]]:
            if isinstance(message, wire.Train) and message.step == 3:
                await asyncio.Event().wait()
            return await super()._work(task_, message, buffers)

    async def scenario() -> None:
        async with asyncio.timeout(20.0):
            await run(Broken(groups_of(range(6)), 0), 2, 0)

    with pytest.raises(HetrlError, match="nobody takes the version"):
        asyncio.run(scenario())


@pytest.mark.parametrize("fails", [task for task in TASKS if task != ACTOR_GENERATION])
@pytest.mark.parametrize("owners", [(0, 0, 0, 0, 0, 0), (0, 1, 2, 3, 4, 5), (0, 1, 0, 1, 2, 1)])
def test_who_fails_ends_the_run_with_its_error(fails: str, owners: tuple[int, ...]) -> None:
    async def scenario() -> None:
        async with asyncio.timeout(20.0):
            await run(World(groups_of(owners), 0, fails), 1, 0)

    with pytest.raises(HetrlError, match=f"{fails} is broken"):
        asyncio.run(scenario())


def test_a_batch_that_cannot_be_scored_ends_a_step_that_takes_for_ever() -> None:
    """The third batch is prepared while the second is trained."""

    class Stuck(World):
        async def _work(self, task: str, message: Any, buffers: list[Any]) -> tuple[Any, Sequence[memoryview]]:
            if task == ACTOR_TRAINING and isinstance(message, wire.Train) and self.works[task] > 5:
                await asyncio.Event().wait()
            return await super()._work(task, message, buffers)

    async def scenario() -> None:
        async with asyncio.timeout(20.0):
            await run(Stuck(groups_of(range(6)), 0, REWARD_INFERENCE), 1, 0)

    with pytest.raises(HetrlError, match="reward_inference is broken"):
        asyncio.run(scenario())


@pytest.mark.parametrize(("warmed", "warmup"), [(0, 0), (1, 1), (2, 0), (0, 3)])
def test_a_run_goes_on_with_another_warm_up_of_the_critic(warmed: int, warmup: int) -> None:
    """What the steps before made of the weights is what they are, whatever the experiment says by now."""

    async def scenario() -> list[Mapping[str, Any]]:
        async with asyncio.timeout(20.0):
            return await run(World(groups_of(range(6)), 0), 1, warmup, taken=2, warmed=warmed)

    versions = [row["weight_version"] for row in asyncio.run(scenario())]
    first = 1 + 2 - warmed
    assert versions == [first + max(0, step - max(2, warmup)) for step in range(2, STEPS)]
