"""The run, from top to bottom: `python -m hetrl.runtime.run.controller SITE_DIRECTORY`.

wait until every member is READY, send GO
publish the first weights
warm start: supervised steps until the sampled reward is where RL should begin
for each step:
    take a batch of groups from the feed, which draws as far ahead as max_staleness allows (sync: not at all)
    score it under the reference
    learn from it: score it under the trainer where that is needed; an optimiser step per minibatch
    publish the weights to every replica; every so many steps, begin a checkpoint
tasks that share devices take turns (`hetrl.runtime.rl.turns`)
write the summary, send FINISH
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Awaitable
from pathlib import Path

from tokenizers import Tokenizer

from hetrl.describe.experiment import WarmStart
from hetrl.errors import HetrlError
from hetrl.runtime import wire
from hetrl.runtime.data.chat import encoder_of
from hetrl.runtime.data.prompts import Source, open_source
from hetrl.runtime.data.rewards import Scorer, open_scorer
from hetrl.runtime.rl.experience import padded
from hetrl.runtime.rl.feed import Feed, oldest_version
from hetrl.runtime.rl.learner import Learner, Policy, timed
from hetrl.runtime.rl.sampling import PromptGroup, Sampler, SamplingSettings, mean_reward
from hetrl.runtime.rl.turns import Turns
from hetrl.runtime.run.checkpoints import CheckpointSchedule
from hetrl.runtime.run.context import GENERATION, Context, exit_with, log_to_stderr, read_context
from hetrl.runtime.run.link_metrics import LinkMeter, link_stats
from hetrl.runtime.run.membership import Membership
from hetrl.runtime.run.record import Record, generation_seconds, sample_metrics
from hetrl.runtime.transport.member import Member
from hetrl.runtime.weights.model_directory import ensure_model_directory
from hetrl.workload import ACTOR_TRAINING, GENERATION_WAIT, REFERENCE_INFERENCE

LINK_STATS_SECONDS = 30.0  # the summary needs them, a row of metrics does without
WARM_START_PROMPTS = 64  # of each check


class Run:
    """One training run; the methods are its phases."""

    def __init__(self, context: Context, member: Member, turns: Turns, record: Record, scorer: Scorer) -> None:
        self.context, self.member, self.turns, self.record = context, member, turns, record
        self.experiment = context.experiment
        self.version = 0
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
        self.policy = self._make_policy()
        self.checkpoints = CheckpointSchedule(self.policy, record, self.experiment.checkpoints, self.experiment.steps)
        self.learner = Learner(self.policy, self.experiment.algorithm, self.pad_token)
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

    def _make_policy(self) -> Policy:
        context, (trainer,) = self.context, self.context.addresses(ACTOR_TRAINING)
        reference = context.worlds(REFERENCE_INFERENCE) if REFERENCE_INFERENCE in context.plan.tasks else ()
        return Policy(
            member=self.member,
            trainer=trainer,
            replicas=context.replicas,
            reference={world.address: world.plan.replicas[0].samples for world in reference},
            temperature=self.experiment.algorithm.temperature,
        )

    async def train(self) -> None:
        """Publish, warm start, every step, then the summary."""
        async with self.turns.of(ACTOR_TRAINING):
            await self.publish()
        if self.experiment.warm_start is not None:
            await warm_start(self, self.experiment.warm_start)
        if self.policy.reference:
            async with self.turns.of(ACTOR_TRAINING):
                await self.policy.publish(self.version, tuple(self.policy.reference))
        prompts = self.experiment.batch.samples // self.experiment.algorithm.samples_per_prompt
        staleness, max_draws = self.experiment.algorithm.max_staleness, self.experiment.algorithm.max_draws
        feed = Feed(self.draw, prompts, staleness, self.experiment.steps, self.version, max_draws)
        try:
            for step in range(1, self.experiment.steps + 1):
                await self.step(step, feed)
        finally:
            await feed.close()
        stats = await link_stats(self.member, self.context.site, LINK_STATS_SECONDS)
        self.record.summary(self.context, stats)
        self.record.events.append("finished")

    async def publish(self) -> wire.Published:
        """Make the current weights the next version at every replica."""
        self.version += 1
        published = await self.policy.publish(self.version, self.policy.replicas)
        self.record.published(published)
        return published

    async def draw(self, number: int) -> PromptGroup:
        """Sample the group of prompt `number`."""
        return await self.sampler.group(self.source(number), number, "train")

    async def step(self, step: int, feed: Feed) -> None:
        """One iteration: a batch, learning, the next weights."""
        seconds: dict[str, float] = {}
        start, turns, version = time.monotonic(), self.turns.seconds, self.version
        dropped, rejected = feed.dropped, feed.rejected
        with timed(seconds, GENERATION_WAIT):
            groups = await feed.batch()
        seconds[GENERATION], latency_seconds = generation_seconds(groups, self.generated)
        self.generated = max(self.generated, *(group.back for group in groups))
        async with self.turns.of(REFERENCE_INFERENCE):
            arrays = await self.learner.scored(groups, step, seconds)
        async with self.turns.of(ACTOR_TRAINING):
            learned = await self.learner.learn(arrays, groups, step, version, seconds)
            with timed(seconds, "weight_sync"):
                published = await self.publish()
            feed.advance(self.version)
            seconds["iteration"] = time.monotonic() - start
            await self.checkpoints.after(step, self.version)
        row = {
            "step": step,
            **sample_metrics(groups),
            **{name: round(value, 8) for name, value in learned.items() if name != "tokens"},
            "weight_version": version,
            "staleness": version - min(oldest_version(group) for group in groups),
            "dropped_groups": feed.dropped - dropped,
            "groups_rejected": feed.rejected - rejected,
            "generation_latency_seconds": round(latency_seconds, 4),
            "turn_seconds": round(self.turns.seconds - turns, 4),
            "weight_bytes": published.bytes,
            "seconds": {task: round(value, 4) for task, value in seconds.items()},
            **await self.links.read(step),
        }
        self.record.step(row, self.experiment.steps)


async def warm_start(run: Run, settings: WarmStart) -> None:
    """Train on generated demonstrations until the sampled reward is where RL should begin.

    RL needs a model that is sometimes right; a model drawn from a seed never is. Raises HetrlError when the reward
    jumps over the range or never gets there.
    """
    low, high = settings.reward
    for done in range(0, settings.max_steps + 1, settings.steps_per_check):
        prompts = [run.source(done * WARM_START_PROMPTS + number) for number in range(WARM_START_PROMPTS)]
        reward = mean_reward(await run.sampler.draw(prompts, f"warm start {done}"))
        run.record.warm_start(done, reward)
        if reward > high:
            raise HetrlError(
                f"warm start: sampled reward {reward:.2f} after {done} supervised steps is above {high}; "
                "lower warm_start.learning_rate or steps_per_check"
            )
        if reward >= low:
            return
        async with run.turns.of(ACTOR_TRAINING):
            for step in range(done, done + settings.steps_per_check):
                await _supervised_step(run, settings, step)
            await run.publish()
    raise HetrlError(
        f"warm start: sampled reward below {low} after {settings.max_steps} supervised steps; "
        "raise warm_start.learning_rate or max_steps"
    )


async def _supervised_step(run: Run, settings: WarmStart, step: int) -> None:
    """Imitate the answers of a batch of prompts."""
    demonstrations = [run.source(step * settings.samples + number) for number in range(settings.samples)]
    sequences = [(run.encode(d), (*_answer_tokens(run, d.answer), run.stop_tokens[0])) for d in demonstrations]
    arrays = padded(sequences, run.pad_token)
    loss = wire.LossSettings(loss="supervised", learning_rate=settings.learning_rate)
    await run.policy.train(arrays, loss, step)


def _answer_tokens(run: Run, answer: str) -> tuple[int, ...]:
    return tuple(run.tokenizer.encode(answer, add_special_tokens=False).ids)


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
