"""The run, from top to bottom: `python -m hetrl.runtime.run.controller SITE_DIRECTORY`.

wait until every member is READY, send GO
publish the first weights
warm start: supervised steps until the sampled reward is where RL should begin
for each step:
    take a batch of groups from the feed, which draws as far ahead as max_staleness allows (sync: not at all)
    score it: reference, reward model and critic, side by side
    train the actor: score the batch where that is needed; an optimiser step per minibatch
    publish its weights to every replica; every so many steps, begin a checkpoint
    train the critic, beside the actor, and publish its weights to where it is asked for values
tasks that share devices take turns (`hetrl.runtime.rl.turns`)
write the summary, send FINISH
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from tokenizers import Tokenizer

from hetrl.describe.experiment import WarmStart
from hetrl.describe.models import reward_model_of
from hetrl.errors import HetrlError
from hetrl.runtime import wire
from hetrl.runtime.data.chat import encoder_of, judged_text_encoder
from hetrl.runtime.data.prompts import Source, open_source
from hetrl.runtime.data.rewards import Scorer, open_scorer
from hetrl.runtime.rl.experience import padded
from hetrl.runtime.rl.feed import Feed, oldest_version
from hetrl.runtime.rl.learner import Arrays, Learner, Versions, timed
from hetrl.runtime.rl.sampling import PromptGroup, Sampler, SamplingSettings, mean_of
from hetrl.runtime.rl.turns import Turns
from hetrl.runtime.run.checkpoints import CheckpointSchedule
from hetrl.runtime.run.context import GENERATION, Context, exit_with, log_to_stderr, read_context
from hetrl.runtime.run.link_metrics import LinkMeter, link_stats
from hetrl.runtime.run.membership import Membership
from hetrl.runtime.run.record import Record, generation_seconds, sample_metrics
from hetrl.runtime.run.tasks import tasks_of
from hetrl.runtime.run.warm_start import warm_start
from hetrl.runtime.transport.member import Member
from hetrl.runtime.weights.model_directory import ensure_model_directory
from hetrl.workload import ACTOR_TRAINING, CRITIC_TRAINING, GENERATION_WAIT, architecture

LINK_STATS_SECONDS = 30.0  # the summary needs them, a row of metrics does without
WARM_START_PROMPTS = 64  # of each check


@dataclass
class Iteration:
    """What the tasks of a step share: its number, when it began, the batch once it is made, and seconds by task."""

    step: int
    start: float
    batch: asyncio.Future[Arrays]
    seconds: dict[str, float] = field(default_factory=dict)

    def trained(self) -> None:
        """Note that a model is trained and its weights are served; the iteration ends with the last one."""
        self.seconds["iteration"] = time.monotonic() - self.start


class Run:
    """One training run; the methods are its phases."""

    def __init__(self, context: Context, member: Member, turns: Turns, record: Record, scorer: Scorer) -> None:
        self.context, self.member, self.turns, self.record = context, member, turns, record
        self.experiment = context.experiment
        self.versions = Versions()
        self.generated = 0.0  # when the last sample of the newest batch was back
        directory = ensure_model_directory(self.experiment.model, context.architecture, context.directory / "model")
        self.stop_tokens, self.pad_token = directory.stop_tokens, directory.pad_token
        self.tokenizer = Tokenizer.from_file(str(directory.path / "tokenizer.json"))
        self.encode = encoder_of(directory.path, self.experiment.data)
        limit = self.experiment.batch.prompt_tokens
        opened = open_source(self.experiment.data, lambda prompt: len(self.encode(prompt)) <= limit)
        self.source: Source = opened.source
        record.prompts(opened.prompts, opened.left_out, limit)
        self.sampler = self._make_sampler(scorer)
        self.tasks = tasks_of(context, member)
        self.learner = self._make_learner(directory.path)
        settings, steps = self.experiment.checkpoints, self.experiment.steps
        self.checkpoints = CheckpointSchedule(self.tasks.actor, record, settings, steps)
        self.critic_checkpoints = (
            None if self.tasks.critic is None else CheckpointSchedule(self.tasks.critic, record, settings, steps)
        )
        others = [site for site in context.plan.site_order if site != context.lead_site]
        self.links = LinkMeter(member, (context.lead_site, *others))

    def _make_sampler(self, scorer: Scorer) -> Sampler:
        algorithm, batch = self.experiment.algorithm, self.experiment.batch
        replicas = self.context.plan.tasks[GENERATION].replicas
        settings = SamplingSettings(
            encode=self.encode,
            tokenizer=self.tokenizer,
            scorer=scorer,
            reward=self.experiment.reward,
            stop_tokens=self.stop_tokens,
            samples_per_prompt=algorithm.samples_per_prompt,
            prompt_tokens=batch.prompt_tokens,
            response_tokens=batch.response_tokens,
            temperature=algorithm.temperature,
            seed=self.experiment.seed,
        )
        shares = {name: plan.samples for name, plan in zip(self.context.replicas, replicas, strict=True)}
        return Sampler(self.member, self.turns, shares, settings)

    def _make_learner(self, policy: Path) -> Learner:
        experiment, judged_text = self.experiment, None
        if experiment.reward.has_model:
            model = reward_model_of(experiment)
            scratch = self.context.directory / "reward-model"
            judge = ensure_model_directory(model, architecture(model.architecture), scratch)
            encode = judged_text_encoder(policy, judge.path, experiment.data)

            def judged_text(group: PromptGroup, sample: wire.Sample) -> tuple[int, ...]:
                return encode(group.prompt, group.prompt_tokens, sample.tokens)

        return Learner(
            tasks=self.tasks,
            turns=self.turns,
            algorithm=experiment.algorithm,
            pad_token=self.pad_token,
            reward=experiment.reward,
            critic=experiment.critic,
            judged_text=judged_text,
        )

    async def train(self) -> None:
        """Publish, warm start, every step, then the summary."""
        async with self.turns.of(ACTOR_TRAINING):
            await self.publish()
        if self.experiment.warm_start is not None:
            settings = self.experiment.warm_start
            await warm_start(settings, self.warm_start_check, partial(self.imitate, settings))
        if self.tasks.reference is not None:
            async with self.turns.of(ACTOR_TRAINING):
                await self.tasks.actor.publish(self.versions.actor, tuple(self.tasks.reference.worlds))
            self.versions.reference = self.versions.actor
        prompts = self.experiment.batch.samples // self.experiment.algorithm.samples_per_prompt
        staleness, max_draws = self.experiment.algorithm.max_staleness, self.experiment.algorithm.max_draws
        feed = Feed(self.draw, prompts, staleness, self.experiment.steps, self.versions.actor, max_draws)
        try:
            for step in range(1, self.experiment.steps + 1):
                await self.step(step, feed)
        finally:
            await feed.close()
        stats = await link_stats(self.member, self.context.site, LINK_STATS_SECONDS)
        self.record.summary(self.context, stats)
        self.record.events.append("finished")

    async def publish(self) -> wire.Published:
        """Make the actor's current weights the next version at every replica."""
        self.versions.actor += 1
        published = await self.tasks.actor.publish(self.versions.actor)
        self.record.published(published)
        return published

    async def draw(self, number: int) -> PromptGroup:
        """Sample the group of prompt `number`."""
        return await self.sampler.group(self.source(number), number, "train")

    async def warm_start_check(self, done: int) -> float:
        """Return the mean reward of prompts that are sampled after `done` supervised steps."""
        prompts = [self.source(done * WARM_START_PROMPTS + number) for number in range(WARM_START_PROMPTS)]
        drawn = await self.sampler.draw(prompts, f"warm start {done}")
        reward = mean_of(group.rule_rewards for group in drawn)
        self.record.warm_start(done, reward)
        return reward

    async def imitate(self, settings: WarmStart, done: int) -> None:
        """Take the supervised steps between two checks, and publish."""
        loss = wire.LossSettings(loss="supervised", learning_rate=settings.learning_rate)
        async with self.turns.of(ACTOR_TRAINING):
            for step in range(done, done + settings.steps_per_check):
                demonstrations = [self.source(step * settings.samples + number) for number in range(settings.samples)]
                sequences = [
                    (self.encode(one), (*self._answer_tokens(one.answer), self.stop_tokens[0]))
                    for one in demonstrations
                ]
                await self.tasks.actor.train(padded(sequences, self.pad_token), loss, step)
            await self.publish()

    def _answer_tokens(self, answer: str) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(answer, add_special_tokens=False).ids)

    async def step(self, step: int, feed: Feed) -> None:
        """One iteration: a batch, its inferences, the trainings side by side, the next weights."""
        turns, versions, dropped, rejected = self.turns.seconds, replace(self.versions), feed.dropped, feed.rejected
        ours = Iteration(step, time.monotonic(), asyncio.get_running_loop().create_future())
        with timed(ours.seconds, GENERATION_WAIT):
            groups = await feed.batch()
        ours.seconds[GENERATION], latency_seconds = generation_seconds(groups, self.generated)
        self.generated = max(self.generated, *(group.back for group in groups))
        async with self.turns.iteration():
            groups, arrays = await self.learner.scored(groups, step, versions, ours.seconds)
            trainings = [self.train_actor(ours, groups, arrays, feed)]
            if self.tasks.critic is not None:
                trainings.append(self.train_critic(ours))
            learned = [item for measured in await asyncio.gather(*trainings) for item in measured.items()]
        row = {
            "step": step,
            **sample_metrics(groups),
            **{name: round(value, 8) for name, value in learned if name != "tokens"},
            "weight_version": versions.actor,
            **({} if self.tasks.critic is None else {"critic_version": versions.critic}),
            "staleness": versions.actor - min(oldest_version(group) for group in groups),
            "dropped_groups": feed.dropped - dropped,
            "groups_rejected": feed.rejected - rejected,
            "generation_latency_seconds": round(latency_seconds, 4),
            "turn_seconds": round(self.turns.seconds - turns, 4),
            "seconds": {task: round(value, 4) for task, value in ours.seconds.items()},
            **await self.links.read(step),
        }
        self.record.step(row, self.experiment.steps)

    async def train_actor(
        self, ours: Iteration, groups: Sequence[PromptGroup], arrays: Arrays, feed: Feed
    ) -> dict[str, float]:
        """Make the batch, which the critic waits for; train the actor on it, and let generation go on with its weights.

        While the critic warms up the weights stay as they are.
        """
        async with self.turns.of(ACTOR_TRAINING):
            with timed(ours.seconds, ACTOR_TRAINING):
                batch, measured = await self.learner.batch(arrays, groups, ours.step, self.versions.actor, ours.seconds)
                ours.batch.set_result(batch)
                warms_up = self.tasks.critic is not None and ours.step <= self.experiment.critic.warmup_steps
                if not warms_up:
                    measured |= await self.learner.train_actor(batch, ours.step)
            measured["weight_bytes"] = 0
            if not warms_up:
                with timed(ours.seconds, "weight_sync"):
                    measured["weight_bytes"] = (await self.publish()).bytes
            feed.advance(self.versions.actor)
            ours.trained()
            await self.checkpoints.after(ours.step, self.versions.actor)
        return measured

    async def train_critic(self, ours: Iteration) -> dict[str, float]:
        """Train the critic, and send its weights to where it is asked for values."""
        assert self.tasks.critic is not None and self.critic_checkpoints is not None
        batch = await ours.batch
        async with self.turns.of(CRITIC_TRAINING):
            with timed(ours.seconds, CRITIC_TRAINING):
                measured = await self.learner.train_critic(batch, ours.step)
            self.versions.critic += 1
            with timed(ours.seconds, "critic_weight_sync"):
                published = await self.tasks.critic.publish(self.versions.critic)
            ours.trained()
            await self.critic_checkpoints.after(ours.step, self.versions.critic)
        return {**measured, "critic_bytes": published.bytes}


async def control(context: Context) -> None:
    """Lead the run to its end; on the way out every member is told that it finished or why it ends."""
    record = Record(context.directory, context.site)
    async with context.member(wire.CONTROLLER) as member:
        try:
            membership = Membership(member, context.members, record.ready)
            turns = Turns(member, context.shared_groups, new_weights=context.plan.algorithm.mode == "sync")
            await membership.gather(context.experiment.launch.gang_timeout_seconds, turns)
            record.events.append("go", epoch=1, members=context.members)
            async with open_scorer(context.experiment.reward, context.experiment.data) as scorer:
                await _first_to_end(Run(context, member, turns, record, scorer).train(), membership.watch())
            await member.send(context.members, wire.Finish())
        except HetrlError as error:
            record.events.append("failed", cause=str(error), exit_code=error.exit_code)
            await member.send(context.members, wire.Abort(cause=str(error)))
            raise


async def _first_to_end(work: Awaitable[None], watch: Awaitable[None]) -> None:
    """Run both; end with the work, or with the error of either."""
    tasks = [asyncio.ensure_future(work), asyncio.ensure_future(watch)]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def main() -> int:
    """Run the controller."""
    parser = argparse.ArgumentParser(prog="python -m hetrl.runtime.run.controller")
    parser.add_argument("directory", type=Path)
    arguments = parser.parse_args()
    log_to_stderr()
    try:
        asyncio.run(control(read_context(arguments.directory)))
    except HetrlError as error:
        return exit_with(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
