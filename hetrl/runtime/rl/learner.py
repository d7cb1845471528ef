"""One iteration of learning from a batch of groups: its inferences, then its trainings.

scored    reference, reward model and critic, each in its turn, groups of devices side by side
valued    advantages from what they say
old       the actor's trainer's own log-probs, where the algorithm needs them: for the advantages, or for its loss alone
train     one optimiser step of a model per minibatch
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from msgspec import structs

from hetrl.describe.algorithm import AlgorithmSection
from hetrl.describe.experiment import Critic, Reward
from hetrl.runtime import wire
from hetrl.runtime.data.chat import JudgedEncoder
from hetrl.runtime.rl.batch import Valued
from hetrl.runtime.rl.critic import critic_batch, value_settings
from hetrl.runtime.rl.experience import experience, loss_settings, minibatches, padded, policy_batch, valued_batch
from hetrl.runtime.rl.sampling import PromptGroup
from hetrl.runtime.rl.tasks import Inference, Trainer
from hetrl.runtime.rl.turns import Turns
from hetrl.runtime.wire.arrays import Arrays
from hetrl.workload import OLD_LOGPROBS

_OF_THE_FIRST_STEP = ("sampler_logprobs", "fresh")  # arrays: later steps see weights that drew none of the tokens
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Tasks:
    """The Megatron tasks of a run; `old` scores a batch under the actor's trainer itself. None: the run has no such."""

    actor: Trainer
    old: Inference
    reference: Inference | None = None
    reward: Inference | None = None
    values: Inference | None = None
    critic: Trainer | None = None


@dataclass
class Versions:
    """The weight versions that tasks have: the actor's, that which the reference keeps, the critic's.

    Who holds a model's lock may send its weights: one version is under way at a time.
    """

    actor: int = 0
    reference: int = 0
    critic: int = 0
    actor_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    critic_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    _reached: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def critic_arrived(self, version: int) -> None:
        """Note that a version of the critic is where it is asked for values."""
        async with self._reached:
            self.critic = version
            self._reached.notify_all()

    async def critic_reaches(self, version: int) -> None:
        """Wait for a version of the critic, or a later one."""
        async with self._reached:
            await self._reached.wait_for(lambda: self.critic >= version)


@dataclass(frozen=True)
class Learner:
    """Trains the actor, and the critic where there is one, with the experiment's algorithm."""

    tasks: Tasks
    turns: Turns
    algorithm: AlgorithmSection
    pad_token: int
    reward: Reward = field(default_factory=Reward)
    critic: Critic = field(default_factory=Critic)
    judged_text: JudgedEncoder | None = None
    steps: int = 1  # of the run: learning rates may fall until the last one

    def experience(self, groups: Sequence[PromptGroup]) -> Arrays:
        """Return the arrays of a batch that all tasks read."""
        return experience(groups, self.pad_token)

    async def scored(
        self,
        arrays: Arrays,
        groups: Sequence[PromptGroup],
        step: int,
        versions: Versions,
        seconds: dict[str, float],
    ) -> tuple[tuple[PromptGroup, ...], Arrays, dict[str, int]]:
        """Return the groups with their final rewards, the arrays of the batch, the critic's version if there is one.

        The arrays get what the reference says, under its version, and the critic, under that which it has by now. Into
        `seconds` goes how long tasks took.
        """
        reference, rewarded, (values, told) = await asyncio.gather(
            self._reference(arrays, step, versions, seconds),
            self._judged(groups, step, seconds),
            self._values(arrays, step, versions, seconds),
        )
        return rewarded, {**arrays, **reference, **values}, told

    async def _reference(self, arrays: Arrays, step: int, versions: Versions, seconds: dict[str, float]) -> Arrays:
        inference = self.tasks.reference
        if inference is None:
            return {}
        async with self._having(inference.task, step, seconds):
            return {"reference_logprobs": await inference.scores(arrays, step, versions.reference)}

    async def _values(
        self, arrays: Arrays, step: int, versions: Versions, seconds: dict[str, float]
    ) -> tuple[Arrays, dict[str, int]]:
        """Ask the critic, once it is not older than it may be; all values of a batch are of one version."""
        inference = self.tasks.values
        if inference is None:
            return {}, {}
        await versions.critic_reaches(step - 1 - self.algorithm.max_staleness)
        async with self._having(inference.task, step, seconds):
            values, version = await inference.newest_scores(arrays, step, versions.critic)
        return {"values": values}, {"critic_version": version}

    @asynccontextmanager
    async def _having(self, task: str, step: int, seconds: dict[str, float]) -> AsyncIterator[None]:
        """Have the devices of a task for the batch of a step, and note how long it took there."""
        async with self.turns.of(task, step):
            with self.turns.timeline.timed(seconds, task):
                yield

    async def _judged(
        self, groups: Sequence[PromptGroup], step: int, seconds: dict[str, float]
    ) -> tuple[PromptGroup, ...]:
        """Return the groups with what the reward model says, where there is one, in their rewards."""
        inference = self.tasks.reward
        if inference is None or self.judged_text is None:
            return tuple(groups)
        texts = await asyncio.to_thread(_encoded, groups, self.judged_text)
        arrays = padded(texts, self.pad_token)
        async with self._having(inference.task, step, seconds):
            scores = await inference.scores(arrays, step)
        last = iter(scores[np.arange(len(texts)), arrays["lengths"] - 1].tolist())
        return tuple(judged(group, [next(last) for _ in group.samples], self.reward) for group in groups)

    async def old_logprobs(self, arrays: Mapping[str, Any], step: int, seconds: dict[str, float]) -> Arrays:
        """Return what the actor's trainer says of a batch, where the algorithm asks for it; in its turn.

        The trainer has the weights that the batch is trained from.
        """
        if not self.algorithm.scores_batch:
            return {}
        with self.turns.timeline.timed(seconds, OLD_LOGPROBS):
            return {"old_logprobs": await self.tasks.old.scores(arrays, step)}

    def valued(self, arrays: Arrays, groups: Sequence[PromptGroup]) -> Valued:
        """Return a batch with its advantages, and what is worth watching in it."""
        return valued_batch(arrays, groups, self.algorithm)

    def policy(self, valued: Valued, old: Arrays, groups: Sequence[PromptGroup], version: int) -> Valued:
        """Return what the policy loss reads of a batch that is trained from `version`, and all to watch in it."""
        batch, watched = valued
        read, measured = policy_batch({**batch, **old}, groups, version, self.algorithm)
        return read, {**watched, **measured}

    async def train_actor(self, batch: Mapping[str, Any], step: int) -> dict[str, float]:
        """Take the actor's optimiser steps; return the means of what they measured, of the mismatch what the first did.

        A minibatch without a token to train on, as of truncated samples alone, is skipped with a warning.
        """
        parts = minibatches(batch, self.algorithm.minibatches, self.algorithm)
        warmup = self.critic.warmup_steps
        rate = self.algorithm.learning_rate_at(step - warmup, self.steps - warmup)
        settings = structs.replace(loss_settings(self.algorithm), learning_rate=rate)
        means = await self._optimise(self.tasks.actor, parts, settings, step)
        fresh, mismatch = means.pop("fresh", 0.0), means.pop("mismatch", 0.0)  # both over all tokens of the minibatch
        return {**means, "mismatch": mismatch / fresh} if fresh else means

    async def train_critic(self, batch: Mapping[str, Any], step: int) -> dict[str, float]:
        """Take the critic's optimiser steps; return the means of what they measured, by names that say whose it is."""
        assert self.tasks.critic is not None
        parts = minibatches(critic_batch(batch), self.algorithm.minibatches)
        settings = structs.replace(
            value_settings(self.critic), learning_rate=self.critic.learning_rate_at(step, self.steps)
        )
        means = await self._optimise(self.tasks.critic, parts, settings, step)
        named = {"loss": "value_loss", "grad_norm": "value_grad_norm", "value_clip_fraction": "value_clip_fraction"}
        return {named[name]: value for name, value in means.items() if name in named}

    async def _optimise(
        self, trainer: Trainer, minibatches: Sequence[Arrays], settings: wire.LossSettings, step: int
    ) -> dict[str, float]:
        parts = [part for part in minibatches if part["mask"].any()]
        if skipped := len(minibatches) - len(parts):
            log.warning("step %d: %d minibatches have no token to train on and are skipped", step, skipped)
        measured = []
        for number, part in enumerate(parts * self.algorithm.epochs):
            sent = {name: array for name, array in part.items() if number == 0 or name not in _OF_THE_FIRST_STEP}
            measured.append(await trainer.train(sent, settings, step))
        names = measured[0] if measured else ()
        rows = {name: [row[name] for row in measured if name in row] for name in names}
        return {name: sum(values) / len(values) for name, values in rows.items()}


def _encoded(groups: Sequence[PromptGroup], encode: JudgedEncoder) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return what the reward model reads of every sample, as a prompt without a response; takes long for many."""
    return [(encode(group.prompt, group.prompt_tokens, one.tokens), ()) for group in groups for one in group.samples]


def judged(group: PromptGroup, scores: Sequence[float], reward: Reward) -> PromptGroup:
    """Return a group whose rewards are those of the rule and of a reward model that gave these scores."""
    parts = [reward.model_scale * (score - reward.model_offset) for score in scores]
    rewards = tuple(rule + part for rule, part in zip(group.rewards, parts, strict=True))
    return replace(group, rewards=rewards, model_scores=tuple(scores))
