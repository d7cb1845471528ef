"""One iteration of learning from a batch of groups: score, then one optimiser step per minibatch."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from hetrl.describe.experiment import AlgorithmSection
from hetrl.runtime.rl.experience import (
    drawn_under,
    experience,
    hyper_of,
    largest_difference,
    minibatches,
    training_batch,
)
from hetrl.runtime.rl.policy import Policy
from hetrl.runtime.rl.sampling import Group
from hetrl.workload import ACTOR_TRAINING, REFERENCE_INFERENCE


@dataclass(frozen=True)
class Learner:
    """Trains the policy with the experiment's algorithm."""

    policy: Policy
    algorithm: AlgorithmSection
    pad_token: int

    async def learn(
        self, groups: Sequence[Group], step: int, version: int, seconds: dict[str, float]
    ) -> dict[str, float]:
        """Take every optimiser step of an iteration; return what they measured, and into `seconds` how long it took.

        The log-probs that the ratio is against are the trainer's own, under the weights at the start of the iteration,
        which are those of `version`.
        """
        arrays = experience(groups, self.pad_token, self.algorithm)
        with timed(seconds, "old_logprobs"):
            arrays["old_logprobs"] = await self.policy.logprobs(self.policy.trainer, arrays, step)
        if self.policy.reference is not None:
            with timed(seconds, REFERENCE_INFERENCE):
                arrays["reference_logprobs"] = await self.policy.logprobs(self.policy.reference, arrays, step)
        batch, seen = training_batch(arrays, groups, self.algorithm)
        with timed(seconds, ACTOR_TRAINING):
            measured = await self._optimise(batch, step)
        fresh = drawn_under(version, groups, arrays["tokens"].shape[1])
        mismatch = largest_difference(arrays, fresh)
        return {**measured, **seen, **({} if mismatch is None else {"mismatch": mismatch})}

    async def _optimise(self, batch: Mapping[str, Any], step: int) -> dict[str, float]:
        algorithm = self.algorithm
        hyper = hyper_of(algorithm)
        parts = minibatches(batch, algorithm.minibatches, algorithm)
        measured = [
            await self.policy.train(part, "policy", hyper, step) for _ in range(algorithm.epochs) for part in parts
        ]
        return {name: sum(row[name] for row in measured) / len(measured) for name in measured[0]}


@contextmanager
def timed(seconds: dict[str, float], task: str) -> Iterator[None]:
    """Note how long the body takes."""
    start = time.monotonic()
    yield
    seconds[task] = time.monotonic() - start
