"""The steps of a run:

prepare, beside the training of the step before:
    take a batch of groups from the feed, which draws as far ahead as max_staleness allows (sync: not at all)
    score it: reference, reward model and critic, side by side
train the actor: score the batch where that is needed; an optimiser step per minibatch
    begin to publish its weights to every replica; every so many steps, begin a checkpoint
train the critic, beside the actor, and begin to publish its weights to where it is asked for values
serve, in mode async beside the next step: wait for the versions that are under way; let generation go on; tell

Tasks that share devices take turns, batch by batch (`hetrl.runtime.rl.turns`); a training leaves once it has exported.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

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
    ITERATION,
    WEIGHT_SYNC,
)

_Result = TypeVar("_Result")
PublishVersion = Callable[[asyncio.Event], Coroutine[Any, Any, wire.Published]]


@dataclass(frozen=True)
class Prepared:
    """A batch that can be trained on: its groups were there at `ready`; the seconds of tasks, and what else is told."""

    step: int
    groups: tuple[PromptGroup, ...]
    arrays: Arrays
    ready: float
    seconds: dict[str, float]
    told: dict[str, float]


@dataclass(frozen=True)
class Trained:
    """What training on a batch measured, by the weight `version` that it began with; what it gave is under way."""

    batch: Prepared
    start: float
    version: int
    measured: Mapping[str, float]
    turn_seconds: float
    actor: asyncio.Future[wire.Published] | None  # None: the critic warms up
    critic: asyncio.Future[wire.Published] | None


async def _first_error(work: asyncio.Future[_Result], beside: Iterable[asyncio.Future[Any] | None]) -> _Result:
    """Return what work does; raise what it, or what goes on beside it, raises, as soon as it does."""
    watched: set[asyncio.Future[Any]] = {work, *(one for one in beside if one is not None)}
    while not work.done():
        done, watched = await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
        for one in done:
            one.result()
    return work.result()


def _rounded(seconds: Mapping[str, float]) -> dict[str, float]:
    return {task: round(value, 4) for task, value in seconds.items()}


class Iterations:
    """Takes the steps; `groups` are the plan's.

    `publish` serves the actor's weights as the next version, and sets the event once the trainer may go on.
    """

    def __init__(
        self,
        experiment: Experiment,
        learner: Learner,
        versions: Versions,
        publish: PublishVersion,
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
        self.works = set[asyncio.Future[Any]]()  # that go on side by side
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
        coming = self.begin(self.prepare(taken + 1, feed, first + max(0, taken - warmup)))
        serving: asyncio.Future[None] | None = None
        try:
            for step in range(taken + 1, self.experiment.steps + 1):
                start = time.monotonic()
                ours = await _first_error(coming, [serving])
                if step < self.experiment.steps:
                    coming = self.begin(self.prepare(step + 1, feed, first + max(0, step - warmup)))
                training = self.begin(self.train(ours, feed, start, warms_up=step <= warmup))
                trained = await _first_error(training, [coming, serving])
                serving = self.begin(self.serve(trained, feed, serving))
                if not self.experiment.algorithm.max_staleness or step == self.experiment.steps:
                    await _first_error(serving, [coming])
        finally:
            works = [*self.works]
            for work in works:
                work.cancel()
            await asyncio.gather(*works, return_exceptions=True)

    def begin(self, work: Coroutine[Any, Any, _Result]) -> asyncio.Future[_Result]:
        """Let work go on beside the rest, until it ends or the steps do."""
        begun = asyncio.ensure_future(work)
        self.works.add(begun)
        begun.add_done_callback(self._ended)
        return begun

    def _ended(self, work: asyncio.Future[Any]) -> None:
        self.works.discard(work)
        if not work.cancelled():
            work.exception()  # of several that fail one is told; asyncio would log the others

    async def train(self, ours: Prepared, feed: Feed, start: float, *, warms_up: bool) -> Trained:
        """Train all models on a batch, side by side, and begin to publish them; `start` is when the step was due."""
        turns, version, seconds = self.turns.seconds, self.versions.actor, ours.seconds
        seconds[GENERATION_WAIT] = max(0.0, ours.ready - start)
        batch: asyncio.Future[Arrays] = asyncio.get_running_loop().create_future()
        actor, critic = self.train_actor(ours, batch, feed, warms_up=warms_up), self.train_critic(ours, batch)
        (learned, published), (valued, critic_published) = await asyncio.gather(actor, critic)
        seconds[ITERATION] = time.monotonic() - start
        turn_seconds = self.turns.seconds - turns
        return Trained(ours, start, version, learned | valued, turn_seconds, published, critic_published)

    async def serve(self, trained: Trained, feed: Feed, before: asyncio.Future[None] | None) -> None:
        """Let generation go on with the version of a step once it is served; tell of the step, after that `before`.

        In mode sync a step ends then, in mode async it ended with its trainings.
        """
        ours, sent, version = trained.batch, {"weight_bytes": 0}, trained.version
        if trained.actor is not None:
            published = await trained.actor
            sent, version = weight_metrics(published), published.version
        feed.served(version)
        if trained.critic is not None:
            sent |= {"critic_bytes": weight_metrics(await trained.critic)["weight_bytes"]}
        if before is not None:
            await before
        if not self.experiment.algorithm.max_staleness:
            ours.seconds[ITERATION] = time.monotonic() - trained.start
        seconds, iteration = ours.seconds, ours.seconds[ITERATION]
        spans = self.timeline.between(trained.start, trained.start + iteration)
        row = {
            "step": ours.step,
            **sample_metrics(ours.groups),
            **{name: round(value, 8) for name, value in {**trained.measured, **sent}.items() if name != "tokens"},
            "weight_version": trained.version,
            "staleness": trained.version - min(oldest_version(group) for group in ours.groups),
            **ours.told,
            "turn_seconds": round(trained.turn_seconds, 4),
            "seconds": _rounded(seconds),
            "spans": [(span.task, round(span.start, 4), round(span.end, 4)) for span in spans],
            "waits": [_rounded(waits(spans, group.tasks, iteration)) for group in self.groups],
            **await self.links.read(ours.step),
        }
        await asyncio.to_thread(self.samples.write, ours.step, ours.groups)
        self.record.step(row, self.experiment.steps)
        self.record.refused(self.links.offences)

    async def train_actor(
        self, ours: Prepared, batch: asyncio.Future[Arrays], feed: Feed, *, warms_up: bool
    ) -> tuple[dict[str, float], asyncio.Future[wire.Published] | None]:
        """Make the batch, which the critic waits for; train the actor on it and begin to publish its weights.

        While the critic warms up the weights stay as they are.
        """
        seconds, version = ours.seconds, self.versions.actor
        published: asyncio.Future[wire.Published] | None = None
        async with self.turns.of(ACTOR_TRAINING, ours.step):
            with self.timeline.timed(seconds, ACTOR_TRAINING):
                made, measured = await self.learner.batch(ours.arrays, ours.groups, ours.step, version, seconds)
                batch.set_result(made)
                if not warms_up:
                    measured |= await self.learner.train_actor(made, ours.step)
            if not warms_up:
                published = await self.exported(partial(self.publish_actor, seconds))
            feed.trained()
            progress = self.progress(feed).to_text()
            await self.checkpoints.after(ours.step, self.versions.actor, progress, partial(self.samples_of, feed))
        return measured, published

    async def exported(self, publish: PublishVersion) -> asyncio.Future[wire.Published]:
        """Begin to publish; return once the weights have left the devices, raise what fails before."""
        left = asyncio.Event()
        published = self.begin(publish(left))
        published.add_done_callback(lambda _: left.set())
        await left.wait()
        if published.done():
            published.result()
        return published

    async def publish_actor(self, seconds: dict[str, float], left: asyncio.Event) -> wire.Published:
        """Serve the actor's weights as the next version, after the one before."""
        async with self.versions.actor_lock:
            with self.timeline.timed(seconds, WEIGHT_SYNC):
                return await self.publish(left)

    def progress(self, feed: Feed) -> Progress:
        """Return what it takes to go on after the steps that were trained."""
        return Progress(self.versions.actor, self.first_version, self.experiment.prompts, feed.position)

    def samples_of(self, feed: Feed) -> bytes:
        """Return the samples that are drawn or under way and not trained on, as a checkpoint keeps them."""
        again, finished = {*feed.position.again}, feed.finished
        kept = {**self.under_way(), **{number: group.samples for number, group in finished.items()}}
        return pack({n: samples for n, samples in kept.items() if n in again and any(one.tokens for one in samples)})

    async def train_critic(
        self, ours: Prepared, batch: asyncio.Future[Arrays]
    ) -> tuple[dict[str, float], asyncio.Future[wire.Published] | None]:
        """Train the critic, if there is one, and begin to send its weights to where it is asked for values."""
        if self.tasks.critic is None:
            return {}, None
        assert self.critic_checkpoints is not None
        made, seconds = await batch, ours.seconds
        async with self.turns.of(CRITIC_TRAINING, ours.step):
            with self.timeline.timed(seconds, CRITIC_TRAINING):
                measured = await self.learner.train_critic(made, ours.step)
            published = await self.exported(partial(self.publish_critic, ours.step, seconds))
            await self.critic_checkpoints.after(ours.step, ours.step)
        return measured, published

    async def publish_critic(self, step: int, seconds: dict[str, float], left: asyncio.Event) -> wire.Published:
        """Bring the critic's weights to where it is asked for values, after the version before."""
        assert self.tasks.critic is not None
        async with self.versions.critic_lock:
            with self.timeline.timed(seconds, CRITIC_WEIGHT_SYNC):
                await self.tasks.critic.export(step)
                left.set()
                published = await self.tasks.critic.published(step)
                await self.versions.critic_arrived(step)
        return published
