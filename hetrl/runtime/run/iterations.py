"""The steps of a run:

prepare, beside the training of the step before:
    take a batch of groups from the feed, which draws as far ahead as max_staleness allows (sync: not at all)
    score it: reference, reward model and critic, side by side
train the actor: score the batch where that is needed; an optimiser step per minibatch
    publish its weights to every replica; every so many steps, begin a checkpoint
train the critic, beside the actor, and publish its weights to where it is asked for values

Tasks that share devices take turns, batch by batch (`hetrl.runtime.rl.turns`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from hetrl.describe.experiment import Experiment
from hetrl.plan.plan import Group
from hetrl.runtime import wire
from hetrl.runtime.rl.feed import Feed, oldest_version
from hetrl.runtime.rl.learner import Learner, Versions
from hetrl.runtime.rl.sampling import PromptGroup
from hetrl.runtime.rl.timeline import waits
from hetrl.runtime.rl.under_way import pack
from hetrl.runtime.run.checkpoints import NO_COPIES, CheckpointSchedule, Copies
from hetrl.runtime.run.link_metrics import LinkMeter
from hetrl.runtime.run.progress import Progress
from hetrl.runtime.run.record import Record, generation_seconds, sample_metrics, weight_metrics
from hetrl.runtime.run.samples import SampleFiles
from hetrl.runtime.wire.arrays import Arrays
from hetrl.workload import (
    ACTOR_GENERATION,
    ACTOR_TRAINING,
    CRITIC_TRAINING,
    CRITIC_WEIGHT_SYNC,
    GENERATION_WAIT,
    WEIGHT_SYNC,
)


@dataclass(frozen=True)
class Prepared:
    """A batch that can be trained on: its groups were there at `ready`; the seconds of tasks, and what else is told."""

    step: int
    groups: tuple[PromptGroup, ...]
    arrays: Arrays
    ready: float
    seconds: dict[str, float]
    told: dict[str, float]


async def _first_error(work: asyncio.Future[None], beside: asyncio.Future[Prepared] | None) -> None:
    """Wait for work; raise what it, or what goes on beside it, raises, as soon as it does."""
    watched: set[asyncio.Future[Any]] = {work} if beside is None else {work, beside}
    while not work.done():
        done, watched = await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
        for one in done:
            one.result()
    work.result()


def _rounded(seconds: Mapping[str, float]) -> dict[str, float]:
    return {task: round(value, 4) for task, value in seconds.items()}


class Iterations:
    """Takes the steps; `publish` serves the actor's weights as the next version; `groups` are the plan's."""

    def __init__(
        self,
        experiment: Experiment,
        learner: Learner,
        versions: Versions,
        publish: Callable[[], Awaitable[wire.Published]],
        record: Record,
        samples: SampleFiles,
        links: LinkMeter,
        groups: Sequence[Group],
        copies: Copies = NO_COPIES,
        under_way: Callable[[], Mapping[int, Sequence[wire.Sample]]] = dict,
    ) -> None:
        self.experiment, self.learner, self.versions = experiment, learner, versions
        self.groups, self.under_way = groups, under_way
        self.publish, self.record, self.samples, self.links = publish, record, samples, links
        self.tasks, self.turns, self.timeline = learner.tasks, learner.turns, learner.turns.timeline
        self.first_version = versions.actor
        self.generated = 0.0  # when the last sample of the newest batch was back
        settings, steps = experiment.checkpoints, experiment.steps
        critic, kept = self.tasks.critic, (record, settings, steps, copies)
        self.checkpoints = CheckpointSchedule(self.tasks.actor, *kept)
        self.critic_checkpoints = None if critic is None else CheckpointSchedule(critic, *kept)

    async def prepare(self, step: int, feed: Feed, version: int) -> Prepared:
        """Take the batch that is trained from `version`, and ask everybody what they say of it."""
        seconds: dict[str, float] = {}
        dropped, rejected = feed.dropped, feed.rejected
        groups = await feed.batch(version)
        ready = time.monotonic()
        seconds[ACTOR_GENERATION], latency_seconds = generation_seconds(groups, self.generated)
        self.generated = max(self.generated, *(group.back for group in groups))
        lost = {"dropped_groups": feed.dropped - dropped, "groups_rejected": feed.rejected - rejected}
        rewarded, arrays, valued = await self.learner.scored(groups, step, self.versions, seconds)
        told = {**valued, **lost, "generation_latency_seconds": round(latency_seconds, 4)}
        return Prepared(step, rewarded, arrays, ready, seconds, told)

    async def run(self, feed: Feed, first: int) -> None:
        """Train on one batch after another; while a step is trained, the next batch is prepared as far as it can be.

        In mode sync that is not before the step's weights are served, as there are no samples. The steps that the feed
        counts already are those of a run that this one goes on from; the first one was trained from version `first`.
        """
        self.first_version, taken = first, feed.position.batches
        warmup = self.experiment.critic.warmup_steps if self.tasks.critic else 0
        coming: asyncio.Future[Prepared] | None = None
        training: asyncio.Future[None] | None = None
        try:
            for step in range(taken + 1, self.experiment.steps + 1):
                start = time.monotonic()
                ours = await (coming or self.prepare(step, feed, first + max(0, taken - warmup)))
                if step < self.experiment.steps:
                    version = first + max(0, step - warmup)
                    coming = asyncio.ensure_future(self.prepare(step + 1, feed, version))
                training = asyncio.ensure_future(self.step(ours, feed, start, warms_up=step <= warmup))
                await _first_error(training, coming)
        finally:
            under_way: list[asyncio.Future[Any]] = [task for task in (training, coming) if task is not None]
            for task in under_way:
                task.cancel()
            await asyncio.gather(*under_way, return_exceptions=True)

    async def step(self, ours: Prepared, feed: Feed, start: float, *, warms_up: bool) -> None:
        """Train all models on a batch, side by side, and serve their weights; `start` is when the step was due."""
        turns, version, seconds = self.turns.seconds, self.versions.actor, ours.seconds
        seconds[GENERATION_WAIT] = max(0.0, ours.ready - start)
        batch: asyncio.Future[Arrays] = asyncio.get_running_loop().create_future()
        trainings = [self.train_actor(ours, batch, feed, start, warms_up=warms_up)]
        if self.tasks.critic is not None:
            trainings.append(self.train_critic(ours, batch, start))
        learned = [item for measured in await asyncio.gather(*trainings) for item in measured.items()]
        spans = self.timeline.between(start, start + seconds["iteration"])
        row = {
            "step": ours.step,
            **sample_metrics(ours.groups),
            **{name: round(value, 8) for name, value in learned if name != "tokens"},
            "weight_version": version,
            "staleness": version - min(oldest_version(group) for group in ours.groups),
            **ours.told,
            "turn_seconds": round(self.turns.seconds - turns, 4),
            "seconds": _rounded(seconds),
            "spans": [(span.task, round(span.start, 4), round(span.end, 4)) for span in spans],
            "waits": [_rounded(waits(spans, group.tasks, seconds["iteration"])) for group in self.groups],
            **await self.links.read(ours.step),
        }
        await asyncio.to_thread(self.samples.write, ours.step, ours.groups)
        self.record.step(row, self.experiment.steps)
        self.record.refused(self.links.offences)

    async def train_actor(
        self, ours: Prepared, batch: asyncio.Future[Arrays], feed: Feed, start: float, *, warms_up: bool
    ) -> dict[str, float]:
        """Make the batch, which the critic waits for; train the actor on it, and let generation go on with its weights.

        While the critic warms up the weights stay as they are.
        """
        seconds, version = ours.seconds, self.versions.actor
        async with self.turns.of(ACTOR_TRAINING, ours.step), self.versions.actor_lock:
            with self.timeline.timed(seconds, ACTOR_TRAINING):
                made, measured = await self.learner.batch(ours.arrays, ours.groups, ours.step, version, seconds)
                batch.set_result(made)
                if not warms_up:
                    measured |= await self.learner.train_actor(made, ours.step)
            measured["weight_bytes"] = 0
            if not warms_up:
                with self.timeline.timed(seconds, WEIGHT_SYNC):
                    measured |= weight_metrics(await self.publish())
            feed.advance(self.versions.actor)
            seconds["iteration"] = time.monotonic() - start
            progress = self.progress(feed).to_text()
            await self.checkpoints.after(ours.step, self.versions.actor, progress, partial(self.samples_of, feed))
        return measured

    def progress(self, feed: Feed) -> Progress:
        """Return what it takes to go on after the steps that were trained."""
        return Progress(self.versions.actor, self.first_version, self.experiment.prompts, feed.position)

    def samples_of(self, feed: Feed) -> bytes:
        """Return the samples that are drawn or under way and not trained on, as a checkpoint keeps them."""
        again, finished = {*feed.position.again}, feed.finished
        kept = {**self.under_way(), **{number: group.samples for number, group in finished.items()}}
        return pack({n: samples for n, samples in kept.items() if n in again and any(one.tokens for one in samples)})

    async def train_critic(self, ours: Prepared, batch: asyncio.Future[Arrays], start: float) -> dict[str, float]:
        """Train the critic, and send its weights to where it is asked for values."""
        assert self.tasks.critic is not None and self.critic_checkpoints is not None
        made, seconds = await batch, ours.seconds
        async with self.turns.of(CRITIC_TRAINING, ours.step):
            with self.timeline.timed(seconds, CRITIC_TRAINING):
                measured = await self.learner.train_critic(made, ours.step)
            with self.timeline.timed(seconds, CRITIC_WEIGHT_SYNC):
                async with self.versions.critic_lock:
                    published = await self.tasks.critic.publish(ours.step)
                    await self.versions.critic_arrived(ours.step)
            seconds["iteration"] = time.monotonic() - start
            await self.critic_checkpoints.after(ours.step, ours.step)
        return {**measured, "critic_bytes": weight_metrics(published)["weight_bytes"]}
