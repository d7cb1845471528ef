"""The run, from top to bottom: `python -m hetrl.runtime.controller SITE_DIRECTORY`.

wait until every member is READY, send GO
warm start: supervised steps until the sampled reward is where RL should begin
for each step:
    draw samples of a batch of prompts under the current weights, and reward them
    score them under trainer and reference, take one optimiser step per minibatch
    publish the weights: the next step starts when every replica serves them
write the summary, send FINISH
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from hetrl.config import seconds_of
from hetrl.errors import HetrlError
from hetrl.runtime import wire
from hetrl.runtime.context import CONTROLLER, GENERATION, Context, exit_with, log_to_stderr, read_context
from hetrl.runtime.data import Source, open_source
from hetrl.runtime.experience import experience, largest_difference, minibatches, padded
from hetrl.runtime.member import Member
from hetrl.runtime.membership import Membership
from hetrl.runtime.model_directory import ensure_model_directory
from hetrl.runtime.policy import Policy
from hetrl.runtime.record import Record, sample_metrics
from hetrl.runtime.sampling import Group, Sampler, mean_reward
from hetrl.workload import ACTOR_TRAINING, REFERENCE_INFERENCE

WARM_START_PROMPTS = 64
LINK_STATS_SECONDS = 30.0


class Run:
    """One training run; the methods are its phases."""

    def __init__(self, context: Context, member: Member, record: Record) -> None:
        self.context, self.member, self.record = context, member, record
        self.experiment = context.experiment
        experiment = self.experiment
        directory = ensure_model_directory(experiment.model, context.architecture, context.directory / "model")
        self.stop_token, self.pad_token = _special_tokens(directory.config)
        self.tokenizer = Tokenizer.from_file(str(directory.path / "tokenizer.json"))
        self.source: Source = open_source(experiment.data)
        self.version = 0
        self.sampler = Sampler(
            member=member,
            replicas=context.replicas,
            shares=tuple(replica.samples for replica in context.plan.tasks[GENERATION].replicas),
            tokenizer=self.tokenizer,
            stop_token=self.stop_token,
            samples_per_prompt=experiment.algorithm.samples_per_prompt,
            prompt_tokens=experiment.batch.prompt_tokens,
            response_tokens=experiment.batch.response_tokens,
            temperature=experiment.algorithm.temperature,
            seed=experiment.seed,
        )
        has_reference = REFERENCE_INFERENCE in context.plan.tasks
        self.policy = Policy(
            member=member,
            trainer=context.task_address(ACTOR_TRAINING),
            replicas=context.replicas,
            reference=context.task_address(REFERENCE_INFERENCE) if has_reference else None,
            temperature=experiment.algorithm.temperature,
        )

    async def train(self) -> None:
        """Warm start, then every step, then the summary."""
        await self.publish()
        if self.experiment.warm_start is not None:
            await self.warm_start()
        if self.policy.reference is not None:
            await self.policy.publish(self.version, (self.policy.reference,))
        for step in range(1, self.experiment.steps + 1):
            await self.step(step)
        links = await self.link_bytes()
        self.record.summary(self.context.run, self.experiment.name, self.context.plan, links)
        self.record.events.append("finished")

    async def publish(self) -> wire.Published:
        """Make the current weights the next version at every replica."""
        self.version += 1
        published = await self.policy.publish(self.version, self.policy.replicas)
        self.record.published(published)
        return published

    async def warm_start(self) -> None:
        """Take supervised steps until the sampled reward lies in the experiment's range."""
        settings = self.experiment.warm_start
        assert settings is not None
        low, high = settings.reward
        for done in range(0, settings.max_steps + 1, settings.steps_per_check):
            reward = mean_reward(await self.draw(f"warm start {done}", WARM_START_PROMPTS, done * WARM_START_PROMPTS))
            self.record.warm_start(done, reward)
            if reward > high:
                raise HetrlError(
                    f"warm start: sampled reward {reward:.2f} after {done} supervised steps is above {high}; "
                    "lower warm_start.learning_rate or steps_per_check"
                )
            if reward >= low:
                return
            for step in range(done, done + settings.steps_per_check):
                await self.supervised_step(step)
            await self.publish()
        raise HetrlError(
            f"warm start: sampled reward below {low} after {settings.max_steps} supervised steps; "
            "raise warm_start.learning_rate or max_steps"
        )

    async def supervised_step(self, step: int) -> None:
        """Imitate the answers of a batch of prompts."""
        settings = self.experiment.warm_start
        assert settings is not None
        demonstrations = [self.source(step * settings.samples + number) for number in range(settings.samples)]
        sequences = [(self.tokens(d.text), (*self.tokens(d.answer), self.stop_token)) for d in demonstrations]
        arrays = padded(sequences, self.pad_token)
        await self.policy.train(arrays, "supervised", {"learning_rate": settings.learning_rate}, step)

    def tokens(self, text: str) -> tuple[int, ...]:
        """Return the token ids of a text, without special tokens."""
        return tuple(self.tokenizer.encode(text, add_special_tokens=False).ids)

    async def draw(self, stream: str, prompts: int, first: int) -> tuple[Group, ...]:
        """Sample `prompts` prompts from number `first` on under the current version."""
        return await self.sampler.draw([self.source(first + n) for n in range(prompts)], stream, self.version)

    async def step(self, step: int) -> None:
        """One iteration of synchronous GRPO."""
        algorithm, seconds = self.experiment.algorithm, dict[str, float]()
        start, version = time.monotonic(), self.version
        prompts = self.experiment.batch.samples // algorithm.samples_per_prompt
        with _timed(seconds, GENERATION):
            groups = await self.draw(f"step {step}", prompts, (step - 1) * prompts)
        arrays = experience(groups, self.pad_token)
        with _timed(seconds, "old_logprobs"):
            arrays["old_logprobs"] = await self.policy.logprobs(self.policy.trainer, arrays, step)
        if self.policy.reference is not None:
            with _timed(seconds, REFERENCE_INFERENCE):
                arrays["reference_logprobs"] = await self.policy.logprobs(self.policy.reference, arrays, step)
        mismatch = largest_difference(arrays)
        with _timed(seconds, ACTOR_TRAINING):
            trained = await self.optimise(arrays, step)
        with _timed(seconds, "weight_sync"):
            published = await self.publish()
        seconds["iteration"] = time.monotonic() - start
        row = {
            "step": step,
            **sample_metrics(groups),
            **{name: round(value, 8) for name, value in trained.items() if name != "tokens"},
            "weight_version": version,
            "mismatch": mismatch,
            "weight_bytes": published.bytes,
            "seconds": {task: round(value, 4) for task, value in seconds.items()},
        }
        self.record.step(row, self.experiment.steps)

    async def optimise(self, arrays: dict[str, Any], step: int) -> dict[str, float]:
        """Take every optimiser step of an iteration and return the mean of what they measured."""
        algorithm = self.experiment.algorithm
        hyper = {
            "learning_rate": algorithm.learning_rate,
            "clip_low": algorithm.clip_low,
            "clip_high": algorithm.clip_high,
            "kl_coefficient": algorithm.kl_coefficient,
            "temperature": algorithm.temperature,
        }
        arrays.pop("sampler_logprobs")
        parts = minibatches(arrays, algorithm.minibatches)
        measured = [
            await self.policy.train(part, "policy", hyper, step) for _ in range(algorithm.epochs) for part in parts
        ]
        return {name: sum(row[name] for row in measured) / len(measured) for name in measured[0]}

    async def link_bytes(self) -> dict[str, int]:
        """Return the bytes that crossed each link of the lead site so far, both directions."""
        gateway = wire.address(self.context.site, "gateway")
        reply = await self.member.request(
            gateway, wire.LinkStats(), timeout_seconds=LINK_STATS_SECONDS, doing="read the link counters"
        )
        assert isinstance(reply.message, wire.LinkStatsReply)
        return {
            f"{self.context.site}-{site}": link.bytes_sent + link.bytes_received
            for site, link in reply.message.links.items()
        }


@contextmanager
def _timed(seconds: dict[str, float], task: str) -> Iterator[None]:
    start = time.monotonic()
    yield
    seconds[task] = time.monotonic() - start


def _special_tokens(config: dict[str, Any]) -> tuple[int, int]:
    """Return the ids of the token that ends a response and of padding, from config.json."""
    stop = config.get("eos_token_id")
    stop = stop[0] if isinstance(stop, list) else stop
    if stop is None:
        raise HetrlError("config.json names no eos_token_id; responses could never end")
    pad = config.get("pad_token_id")
    return int(stop), int(pad if pad is not None else stop)


async def control(context: Context) -> None:
    """Lead the run to its end; on the way out every member is told that it finished or why it ends."""
    record = Record(context.directory, context.site)
    async with context.member(CONTROLLER) as member:
        try:
            membership = Membership(member, context.members, record.ready)
            await membership.gather(seconds_of(context.experiment.launch.gang_timeout))
            record.events.append("go", epoch=1, members=context.members)
            await _first_to_end(Run(context, member, record).train(), membership.watch())
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
    parser = argparse.ArgumentParser(prog="python -m hetrl.runtime.controller")
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
