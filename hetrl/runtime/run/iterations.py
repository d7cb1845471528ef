"""The steps of a run:

prepare, beside the training of the step before:
    take a batch of groups from the feed, which draws as far ahead as max_staleness allows (sync: not at all)
    score it: reference, reward model and critic, side by side
    the actor's trainer scores it, too, where that is needed: beside them, once it has trained on the batch before
train the actor: an optimiser step per minibatch
    begin to publish its weights to every replica, and let generation go on once they are served
    every so many steps, begin a checkpoint
train the critic, beside the actor and its scoring (but for a KL penalty in the reward); begin to publish its weights
serve, in mode async beside the next step: wait for the versions that are under way; tell

Tasks that share devices take turns, batch by batch (`hetrl.runtime.rl.turns`); a training leaves once it has exported.
Where Slurm ends a job of the run, the step that is trained then is the last one, and its checkpoints are written.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any

from hetrl.describe.experiment import Experiment
from hetrl.errors import TimeUpError
from hetrl.plan.plan import Group
from hetrl.runtime import wire
from hetrl.runtime.rl.batch import Actor, Batch, Prepared, Trained
from hetrl.runtime.rl.feed import Feed, oldest_version
from hetrl.runtime.rl.learner import Learner, Versions
from hetrl.runtime.rl.timeline import waits
from hetrl.runtime.rl.under_way import pack
from hetrl.runtime.run.checkpoints import NO_COPIES, CheckpointSchedule, Copies, LastStep, WholeSteps
from hetrl.runtime.run.link_metrics import LinkMeter
from hetrl.runtime.run.progress import Progress
from hetrl.runtime.run.record import Record, generation_seconds, sample_metrics, weight_metrics
from hetrl.runtime.run.samples import SampleFiles
from hetrl.runtime.side_by_side import Works
from hetrl.workload import (
    ACTOR_GENERATION,
    ACTOR_TRAINING,
    CRITIC_TRAINING,
    CRITIC_WEIGHT_SYNC,
    GENERATION_WAIT,
    ITERATION,
    OLD_LOGPROBS,
    WEIGHT_SYNC,
    scores_beside_inferences,
)

PublishVersion = Callable[[asyncio.Event], Coroutine[Any, Any, wire.Published]]


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
        self.begins_with = 0, versions.actor  # steps that were taken before, and the version of weights behind them
        self.warmup = experiment.critic.warmup_steps if self.tasks.critic else 0
        self.last = LastStep(experiment.steps, record)
        self.generated = 0.0  # when the last sample of the newest batch was back
        self.works: Works  # that go on side by side, while steps are taken
        self.trainer = asyncio.Lock()  # one batch after the other
        trains = {name for group in groups if ACTOR_TRAINING in group.tasks for name in group.tasks}
        algorithm = experiment.algorithm
        self.beside = scores_beside_inferences(algorithm.scores_batch, algorithm.max_staleness, trains)
        critic = self.tasks.critic
        self.whole = WholeSteps([ACTOR_TRAINING, *([] if critic is None else [CRITIC_TRAINING])])
        kept = (record, experiment.checkpoints, self.last, self.whole, copies)
        self.checkpoints = CheckpointSchedule(self.tasks.actor, *kept)
        self.critic_checkpoints = None if critic is None else CheckpointSchedule(critic, *kept)

    def trained_from(self, step: int) -> int:
        """Return the version that a step trains from: each but those of the critic's warm-up gives the next one."""
        begun, version = self.begins_with
        return version + max(0, step - 1 - max(begun, self.warmup))

    async def prepare(self, step: int, feed: Feed) -> Prepared:
        """Take the batch of a step, send it to the actor's trainer, and ask all others what they say of it."""
        seconds: dict[str, float] = {}
        version = self.trained_from(step)
        dropped, rejected = feed.dropped, feed.rejected
        groups = await feed.batch(version)
        ready = time.monotonic()
        seconds[ACTOR_GENERATION], latency_seconds = generation_seconds(groups, self.generated)
        self.generated = max(self.generated, *(group.back for group in groups))
        lost = {"dropped_groups": feed.dropped - dropped, "groups_rejected": feed.rejected - rejected}
        batch = Batch(step, self.learner.experience(groups), step <= self.warmup, seconds)
        actor = self.works.begin(self.train_actor(batch, feed))
        rewarded, arrays, valued = await self.learner.scored(batch.arrays, groups, step, self.versions, seconds)
        batch.scored.set_result((rewarded, arrays))
        if not self.experiment.algorithm.kl_in_reward:
            batch.valued.set_result(self.learner.valued(arrays, rewarded))
        told = {**valued, **lost, "generation_latency_seconds": round(latency_seconds, 4)}
        return Prepared(batch, rewarded, ready, told, actor)

    async def run(self, feed: Feed) -> None:
        """Train on one batch after another; while a step is trained, the next batch is prepared as far as it can be.

        In mode sync that is not before the step's weights are served, as there are no samples. The steps that the feed
        counts already are those of a run that this one goes on from.
        """
        self.works, step = Works(), feed.position.batches
        self.begins_with = step, self.versions.actor
        self.whole.begin_with(step)
        self.last.reach(step)
        coming = self.works.begin(self.prepare(step + 1, feed))
        serving: asyncio.Future[None] | None = None
        start = time.monotonic()
        try:
            while (step := step + 1) <= self.last.number:
                ours = await self.works.result(coming)
                if step < self.last.number:
                    coming = self.works.begin(self.prepare(step + 1, feed))
                trained = await self.works.result(self.works.begin(self.train(ours, start)))
                serving = self.works.begin(self.serve(trained, serving))
                if not self.experiment.algorithm.max_staleness or step >= self.last.number:
                    await self.works.result(serving)
                # One begins where the one before ended: samples are drawn while that is written down.
                start += ours.batch.seconds[ITERATION]
        finally:
            await self.works.end()
        if self.last.number < self.experiment.steps:
            raise TimeUpError(
                f"{self.last.site}: Slurm ends its job; kept up to step {self.last.number} of {self.experiment.steps}, "
                "from where `hetrl resume` goes on"
            )

    async def train(self, ours: Prepared, start: float) -> Trained:
        """Train all models on a batch, side by side, and begin to publish them; `start` is when the step was due."""
        turns, seconds = self.turns.seconds, ours.batch.seconds
        seconds[GENERATION_WAIT] = max(0.0, ours.ready - start)
        both = asyncio.gather(ours.actor, self.train_critic(ours.batch))
        (learned, version, served), (valued, critic_published) = await both
        seconds[ITERATION] = time.monotonic() - start
        turn_seconds = self.turns.seconds - turns
        return Trained(ours, start, version, learned | valued, turn_seconds, served, critic_published)

    async def serve(self, trained: Trained, before: asyncio.Future[None] | None) -> None:
        """Wait until what a step gave is served; tell of the step, after that `before`.

        In mode sync a step ends then, in mode async it ended with its trainings.
        """
        ours, published = trained.prepared, await trained.actor
        step, seconds = ours.batch.step, ours.batch.seconds
        sent = {"weight_bytes": 0} if published is None else weight_metrics(published)
        if trained.critic is not None:
            sent |= {"critic_bytes": weight_metrics(await trained.critic)["weight_bytes"]}
        if before is not None:
            await before
        if not self.experiment.algorithm.max_staleness:
            seconds[ITERATION] = time.monotonic() - trained.start
        iteration = seconds[ITERATION]
        spans = self.timeline.between(trained.start, trained.start + iteration)
        row = {
            "step": step,
            **sample_metrics(ours.groups),
            **{name: round(value, 8) for name, value in {**trained.measured, **sent}.items() if name != "tokens"},
            "weight_version": trained.version,
            "staleness": trained.version - min(oldest_version(group) for group in ours.groups),
            **ours.told,
            "turn_seconds": round(trained.turn_seconds, 4),
            "seconds": _rounded(seconds),
            "spans": [(span.task, round(span.start, 4), round(span.end, 4)) for span in spans],
            "waits": [_rounded(waits(spans, group.tasks, iteration)) for group in self.groups],
            **await self.links.read(step),
        }
        await asyncio.to_thread(self.samples.write, step, ours.groups)
        self.record.step(row, self.experiment.steps)
        self.record.refused(self.links.offences)

    async def train_actor(self, batch: Batch, feed: Feed) -> Actor:
        """Score the batch where it is needed, train the actor on it and begin to publish its weights.

        The rewards wait for the scores where a KL penalty is taken off them. While the critic warms up, the actor's
        weights stay as they are.
        """
        step, seconds = batch.step, batch.seconds
        published: asyncio.Future[wire.Published] | None = None
        if not self.beside:
            await batch.scored
        async with self.trainer, self.turns.of(ACTOR_TRAINING, step):
            version = self.versions.actor
            old = await self.learner.old_logprobs(batch.arrays, step, seconds)
            groups, arrays = await batch.scored
            with self.timeline.timed(seconds, ACTOR_TRAINING):
                if not batch.valued.done():
                    batch.valued.set_result(self.learner.valued({**arrays, **old}, groups))
                read, measured = self.learner.policy(await batch.valued, old, groups, version)
                if not batch.warms_up:
                    measured |= await self.learner.train_actor(read, step)
            seconds[ACTOR_TRAINING] += seconds.get(OLD_LOGPROBS, 0.0)
            if not batch.warms_up:
                published = await self.exported(partial(self.publish_actor, seconds))
            feed.trained()
            served, progress = self.works.begin(self.served(feed, version, published)), self.progress(feed).to_text()
            await self.checkpoints.after(step, self.versions.actor, progress, partial(self.samples_of, feed))
        return measured, version, served

    async def served(
        self, feed: Feed, version: int, published: asyncio.Future[wire.Published] | None
    ) -> wire.Published | None:
        """Let generation go on once what a step that began with `version` gave is served, whatever the critic does."""
        sent = None if published is None else await published
        feed.served(version if sent is None else sent.version)
        return sent

    async def exported(self, publish: PublishVersion) -> asyncio.Future[wire.Published]:
        """Begin to publish; return once the weights have left the devices, raise what fails before."""
        left = asyncio.Event()
        published = self.works.begin(publish(left))
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
        return Progress(self.versions.actor, self.experiment.prompts, feed.position)

    def samples_of(self, feed: Feed) -> bytes:
        """Return the samples that are drawn or under way and not trained on, as a checkpoint keeps them."""
        again, finished = {*feed.position.again}, feed.finished
        kept = {**self.under_way(), **{number: group.samples for number, group in finished.items()}}
        return pack({n: samples for n, samples in kept.items() if n in again and any(one.tokens for one in samples)})

    async def train_critic(self, batch: Batch) -> tuple[dict[str, float], asyncio.Future[wire.Published] | None]:
        """Train the critic, if there is one, and begin to send its weights to where it is asked for values."""
        if self.tasks.critic is None:
            return {}, None
        assert self.critic_checkpoints is not None
        (valued, _), step, seconds = await batch.valued, batch.step, batch.seconds
        async with self.turns.of(CRITIC_TRAINING, step):
            with self.timeline.timed(seconds, CRITIC_TRAINING):
                measured = await self.learner.train_critic(valued, step)
            published = await self.exported(partial(self.publish_critic, step, seconds))
            await self.critic_checkpoints.after(step, step)
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
