"""The run, from top to bottom: `python -m hetrl.runtime.run.controller SITE_DIRECTORY`.

wait until every member is READY, send GO
publish the first weights
warm start: supervised steps until the sampled reward is where RL should begin
or, of a run that goes on from another one: take up its last checkpoints and publish what they hold
the steps                                                            (`hetrl.runtime.run.iterations`)
write the summary, send FINISH
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Collection
from contextlib import suppress
from functools import partial
from pathlib import Path

from hetrl.describe.experiment import WarmStart
from hetrl.errors import HetrlError
from hetrl.runtime import wire
from hetrl.runtime.checkpoints.files import METRICS_BEFORE
from hetrl.runtime.data.chat import encoder_of, read_tokenizer
from hetrl.runtime.data.prompts import Source, open_source
from hetrl.runtime.data.rewards import Scorer, open_scorer
from hetrl.runtime.garbage import collect_rarely
from hetrl.runtime.rl.draws import Draws
from hetrl.runtime.rl.experience import padded
from hetrl.runtime.rl.feed import Feed, Position
from hetrl.runtime.rl.learner import Versions
from hetrl.runtime.rl.sampling import PromptGroup, Sampler, mean_of
from hetrl.runtime.rl.serving import Serving
from hetrl.runtime.rl.turns import Turns
from hetrl.runtime.rl.under_way import Samples, oldest_version, unpack
from hetrl.runtime.run.context import GENERATION, WORD_SECONDS, Context, exit_with, log_to_stderr, read_context
from hetrl.runtime.run.copies import KeptCheckpoints
from hetrl.runtime.run.deaths import ReleasedError, killed_at, released_at
from hetrl.runtime.run.iterations import Iterations
from hetrl.runtime.run.link_metrics import LinkMeter, link_stats
from hetrl.runtime.run.membership import Membership
from hetrl.runtime.run.progress import Progress, read_progress, rows_until
from hetrl.runtime.run.record import Record
from hetrl.runtime.run.samples import SampleFiles
from hetrl.runtime.run.tasks import dispatch_of, learner_of, sampling_of, tasks_of
from hetrl.runtime.run.warm_start import warm_start
from hetrl.runtime.side_by_side import first_to_end
from hetrl.runtime.transport.member import Member
from hetrl.runtime.weights.model_directory import ensure_model_directory
from hetrl.workload import ACTOR_TRAINING, CRITIC_TRAINING, WEIGHT_SYNC

LINK_STATS_SECONDS = 30.0  # the summary needs them, a row of metrics does without
WARM_START_PROMPTS, WARM_START_SAMPLES = 64, 256  # of each check, at least: a standard deviation of 0.03 or less


class Run:
    """One training run; the methods are its phases. Replicas of generation that are `absent` at its start may come."""

    def __init__(
        self,
        context: Context,
        member: Member,
        turns: Turns,
        record: Record,
        scorer: Scorer,
        absent: Collection[str] = (),
    ) -> None:
        self.context, self.member, self.turns, self.record = context, member, turns, record
        self.absent = {*absent}
        self.released = set[str]()  # sites whose rollouts were given back
        self.experiment = context.experiment
        self.versions = Versions()
        directory = ensure_model_directory(self.experiment.model, context.architecture, context.directory / "model")
        self.stop_tokens, self.pad_token = directory.stop_tokens, directory.pad_token
        self.tokenizer = read_tokenizer(directory.path)
        self.encode = encoder_of(directory.path, self.experiment.data)
        limit = self.experiment.batch.prompt_tokens
        opened = open_source(self.experiment.data, lambda prompt: len(self.encode(prompt)) <= limit)
        self.source: Source = opened.source
        record.prompts(opened.prompts, opened.left_out, limit)
        self.draws = Draws(member, dispatch_of(context), self.lost, turns.timeline, turns.generating)
        for name in self.absent:
            self.draws.begin_without(name)
        sampling = sampling_of(self.experiment, self.encode, self.tokenizer, scorer, self.stop_tokens)
        self.sampler = Sampler(self.draws, turns, sampling)
        self.tasks = tasks_of(context, member)
        self.learner = learner_of(context, self.tasks, turns, directory)
        others = [site for site in context.plan.site_order if site != context.lead_site]
        planned_seconds = context.planned_seconds(WEIGHT_SYNC)
        self.serving = Serving(self.tasks.actor, self.draws, self.versions, record, planned_seconds)
        self.kept = KeptCheckpoints(context, member, record, self.living)
        links = LinkMeter(member, (context.lead_site, *others))
        samples = SampleFiles(context.directory, self.experiment.rollouts, self._text)
        self.iterations = Iterations(
            self.experiment,
            self.learner,
            self.versions,
            self.serving.publish,
            record,
            samples,
            links,
            context.plan.groups,
            self.kept,
            lambda: {**self.begun, **self.draws.under_way},
        )
        self.begun: dict[int, Samples] = {}  # by their prompts, the samples that were under way where this run goes on

    def spare(self, member: str, error: HetrlError) -> bool:
        """Whether the run goes on without a member: a keeper, or a replica of generation as long as one is left."""
        if member in self.draws.replicas:
            self.draws.lost(member, error)
        elif member in self.absent:
            self.record.replica_lost(member, error)
        return member in self.context.replicas or wire.role_of(member) == wire.KEEPER

    def back(self, member: str) -> bool:
        """Whether a member that was started again, or comes late, takes part: a replica with devices of its own."""
        if member not in self.context.replicas or self.context.takes_turns(GENERATION):
            return False
        (self.record.replica_joined if member in self.absent else self.record.replica_back)(member)
        self.absent.discard(member)
        self.released.discard(wire.site_of(member))
        self.serving.back(member)
        return True

    def living(self) -> set[str]:
        """Return the members of tasks that were not lost."""
        lost = {*self.context.replicas} - {*self.draws.replicas}
        return {*self.context.members} - lost

    def lost(self, replica: str, error: HetrlError) -> None:
        """Go on without a replica of generation."""
        self.turns.forget(replica)
        if isinstance(error, ReleasedError):
            self.released.add(wire.site_of(replica))
            self.record.replica_released(replica)
        else:
            self.record.replica_lost(replica, error)

    async def train(self) -> None:
        """Begin, or go on where another run was, take every step, then write the summary."""
        step = await self.kept.newest() if self.context.goes_on else None
        if self.context.goes_on and step is None:
            self.record.goes_on(0, 0, ())
        progress = await (self.begin() if step is None else self.go_on(step))
        staleness, max_draws = self.experiment.algorithm.max_staleness, self.experiment.algorithm.max_draws
        prompts, steps, start = self.experiment.prompts, self.experiment.steps, progress.position
        under = {n: version for n, one in self.begun.items() if (version := oldest_version(one)) is not None}
        feed = Feed(self.draw, prompts, staleness, steps, self.versions.actor, max_draws, start, under)
        try:
            await self.iterations.run(feed)
        finally:
            await feed.close()
        await self.kept.settle()
        await self.turns.settled()
        stats = await link_stats(self.member, self.context.site, LINK_STATS_SECONDS)
        self.record.summary(self.context, stats)
        self.record.events.append("finished")

    async def begin(self) -> Progress:
        """Serve the first weights, and take the supervised steps where there are some; their end is a checkpoint."""
        async with self.turns.of(ACTOR_TRAINING), self.versions.actor_lock:
            await self.serving.publish()
        if self.experiment.warm_start is not None:
            settings = self.experiment.warm_start
            await warm_start(settings, self.warm_start_check, partial(self.imitate, settings))
        progress = Progress(self.versions.actor, self.experiment.prompts, Position())
        async with self.turns.of(ACTOR_TRAINING):
            await self.keep_reference(progress.version)
            if self.experiment.warm_start is not None:  # nobody can draw these weights from a seed again
                await self.iterations.checkpoints.first(progress.version, progress.to_text())
        return progress

    async def keep_reference(self, version: int) -> None:
        """Let the reference keep the weights that the actor's trainer has."""
        if self.tasks.reference is not None:
            await self.tasks.actor.publish(version, tuple(self.tasks.reference.worlds))
            self.versions.reference = version

    async def go_on(self, step: int) -> Progress:
        """Take up the checkpoints of a step, and serve what they hold under the versions that it had."""
        actor, critic, prompts = self.tasks.actor, self.tasks.critic, self.experiment.prompts
        warm = await self.kept.bring(step, first=self.tasks.reference is not None)
        async with self.turns.of(ACTOR_TRAINING), self.versions.actor_lock:
            if self.tasks.reference is not None:  # it keeps what the first step began with
                await self.keep_reference((await actor.restore(0))[0].version if warm else 1)
            restored, samples = await actor.restore(step)
            progress = read_progress(restored.progress, prompts)
            self.versions.actor = progress.version - 1
            await self.serving.publish()
        if critic is not None and step > 0:
            async with self.turns.of(CRITIC_TRAINING), self.versions.critic_lock:
                await critic.restore(step)
                await critic.publish(step)
                await self.versions.critic_arrived(step)
        self.turns.begin_with(step + 1)
        earlier = [one.directory / "metrics.jsonl" for one in self.context.continues]
        rows, spent_seconds = rows_until([*earlier, self.context.directory / METRICS_BEFORE], step, self.record.began)
        most = self.experiment.batch.response_tokens
        self.begun = unpack(samples, self.experiment.algorithm.samples_per_prompt, most)
        begun = sum(bool(oldest_version(samples)) for samples in self.begun.values())
        self.record.goes_on(step, progress.version, rows, begun, spent_seconds)
        return progress

    def link_changed(self, site: str) -> None:
        """Go on as far as possible without what lies behind a link that is out."""
        out = self.member.links.are_out(site)
        if not out or site not in self.released:  # whose gateway ends with its rollouts
            self.record.link_changed(site, out=out)
        self.draws.link_changed(site)

    async def draw(self, number: int) -> PromptGroup:
        """Sample the group of prompt `number`."""
        return await self.sampler.group(self.source(number), number, "train", self.begun.get(number, ()))

    async def warm_start_check(self, done: int) -> float:
        """Return the mean reward of prompts that are sampled after `done` supervised steps."""
        count = max(WARM_START_PROMPTS, WARM_START_SAMPLES // self.experiment.algorithm.samples_per_prompt)
        prompts = [self.source(done * count + number) for number in range(count)]
        drawn = await self.sampler.draw(prompts, f"warm start {done}")
        reward = mean_of(group.rule_rewards for group in drawn)
        self.record.warm_start(done, reward)
        return reward

    async def imitate(self, settings: WarmStart, done: int) -> None:
        """Take the supervised steps between two checks, and publish."""
        loss = wire.LossSettings(loss="supervised", learning_rate=settings.learning_rate)
        async with self.turns.of(ACTOR_TRAINING), self.versions.actor_lock:
            for step in range(done, done + settings.steps_per_check):
                demonstrations = [self.source(step * settings.samples + number) for number in range(settings.samples)]
                answers = [self.tokenizer.encode(one.answer, add_special_tokens=False).ids for one in demonstrations]
                sequences = [
                    (self.encode(one), (*answer, self.stop_tokens[0]))
                    for one, answer in zip(demonstrations, answers, strict=True)
                ]
                await self.tasks.actor.train(padded(sequences, self.pad_token), loss, step)
            await self.serving.publish()

    def _text(self, tokens: list[int]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=False))


async def control(context: Context) -> None:
    """Lead the run to its end; on the way out every member is told that it finished or why it ends."""
    record = Record(context.directory, context.site)
    async with context.member(wire.CONTROLLER) as member:
        try:
            killed = partial(killed_at, context.directory, context.site)
            released = partial(released_at, context.directory)
            membership = Membership(member, context.members, record.ready, context.ranks, killed, released)
            member.start_heartbeat(lambda: membership.living, WORD_SECONDS)
            turns = Turns(member, context.shared_groups, new_weights=context.plan.algorithm.mode == "sync")
            launch = context.experiment.launch
            seconds = launch.queue_timeout_seconds, launch.gang_timeout_seconds
            absent = await membership.gather(*seconds, turns, context.replicas, context.start_with)
            record.events.append("go", members=[*membership.joined], absent=absent)
            async with open_scorer(context.experiment.reward, context.experiment.data) as scorer:
                run = Run(context, member, turns, record, scorer, absent)
                watching = membership.watch(run.spare, run.back, run.iterations.last.end_soon)
                with member.links.told(run.link_changed):
                    await first_to_end(run.train(), watching, run.serving.catch_up(), run.kept.serve())
            await member.send(context.members, finish := wire.Finish())
            for lost in {*context.members} - {*membership.living}:  # told as well, but nobody waits until it has heard
                member.abandon(lost, wire.priority_of(finish), "the run is finished")
        except Exception as error:  # a full disk or a defect, too: else the members wait for what never comes
            cause = _cause_of(error, context.site)
            with suppress(OSError):
                record.events.append("failed", cause=str(cause), exit_code=cause.exit_code)
            await member.send((*context.members, *context.ranks), wire.Abort(cause=str(cause)))
            if isinstance(error, OSError):
                raise cause from error
            raise


def _cause_of(error: Exception, site: str) -> HetrlError:
    """Return what members and events are told."""
    if isinstance(error, OSError):
        return HetrlError(f"{site}: the controller cannot go on: {error}; mend this, then `hetrl resume`")
    return error if isinstance(error, HetrlError) else HetrlError(f"{site}: {error!r}; see the controller's log")


def main() -> int:
    """Run the controller."""
    parser = argparse.ArgumentParser(prog="python -m hetrl.runtime.run.controller")
    parser.add_argument("directory", type=Path)
    arguments = parser.parse_args()
    log_to_stderr()
    collect_rarely()
    try:
        asyncio.run(control(read_context(arguments.directory)))
    except HetrlError as error:
        return exit_with(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
