"""One iteration of learning from a batch of groups: score it where that is needed, one optimiser step per minibatch.

The policy is what the controller sees of the Megatron tasks: addresses that take score, train, save and publish
requests.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from hetrl.describe.algorithm import AlgorithmSection
from hetrl.errors import HetrlError
from hetrl.runtime import wire
from hetrl.runtime.rl.balance import over_replicas
from hetrl.runtime.rl.experience import experience, loss_settings, minibatches, training_batch
from hetrl.runtime.rl.sampling import PromptGroup
from hetrl.runtime.transport.member import Member
from hetrl.runtime.wire.arrays import pack, unpack
from hetrl.workload import ACTOR_TRAINING, OLD_LOGPROBS, REFERENCE_INFERENCE

_OF_THE_FIRST_STEP = ("sampler_logprobs", "fresh")  # arrays: later steps see weights that drew none of the tokens
log = logging.getLogger(__name__)
_Answer = TypeVar("_Answer", wire.Scored, wire.Trained, wire.Saved, wire.Published)


@dataclass(frozen=True)
class Policy:
    """The addresses of the actor's trainer and of those that receive its weights.

    `reference` are the worlds of the reference model, with the share of a batch that each scores; empty without one.
    """

    member: Member
    trainer: str
    replicas: tuple[str, ...]
    reference: Mapping[str, int]
    temperature: float

    async def logprobs(
        self, worlds: Mapping[str, int], arrays: Mapping[str, NDArray[Any]], step: int
    ) -> NDArray[np.float32]:
        """Return the log-probs [n, s] of a batch, under the weights of Megatron worlds that are given by their address.

        Each scores tokens in proportion to its share.
        """
        scores = np.zeros(arrays["tokens"].shape, np.float32)
        parts = over_replicas(arrays["lengths"].tolist(), [*worlds.values()])

        async def score(world: str, part: Sequence[int]) -> None:
            specs, buffers = pack({name: arrays[name][[*part]] for name in ("tokens", "lengths")})
            request = wire.Score(step=step, what="logprobs", temperature=self.temperature, arrays=specs)
            answer, arrived = await self._ask(world, request, wire.Scored, f"step {step}: log-probs", buffers)
            scores[[*part]] = unpack(answer.arrays, arrived)["scores"]

        await asyncio.gather(*(score(world, part) for world, part in zip(worlds, parts, strict=True) if part))
        return scores

    async def train(
        self, arrays: Mapping[str, NDArray[Any]], settings: wire.LossSettings, step: int
    ) -> dict[str, float]:
        """Make one optimiser step and return what it measured."""
        specs, buffers = pack(arrays)
        request = wire.Train(step=step, settings=settings, arrays=specs)
        answer, _ = await self._ask(self.trainer, request, wire.Trained, f"step {step}: train", buffers)
        return answer.metrics

    async def save(self, step: int, version: int) -> wire.Saved:
        """Begin a checkpoint after a step; it is written beside the next ones until `finish_save`."""
        request = wire.Save(step=step, version=version)
        answer, _ = await self._ask(self.trainer, request, wire.Saved, f"checkpoint after step {step}")
        return answer

    async def finish_save(self, step: int, keep: int, *, wait: bool) -> wire.Saved:
        """Complete the checkpoint of a step and keep the newest; without `wait` only if it is written already."""
        request = wire.FinishSave(step=step, keep=keep, wait=wait)
        answer, _ = await self._ask(self.trainer, request, wire.Saved, f"checkpoint after step {step}")
        return answer

    async def publish(self, version: int, receivers: Sequence[str]) -> wire.Published:
        """Send the current weights as `version`; returns when every receiver serves them."""
        request = wire.Publish(version=version, receivers=tuple(receivers))
        answer, _ = await self._ask(self.trainer, request, wire.Published, f"publish weight version {version}")
        return answer

    async def _ask(
        self, to: str, request: wire.Message, wanted: type[_Answer], doing: str, buffers: Sequence[memoryview] = ()
    ) -> tuple[_Answer, Sequence[memoryview]]:
        """Return an answer of the type that is wanted, and its buffers."""
        reply = await self.member.request(to, request, buffers, timeout_seconds=wire.WORK_SECONDS, doing=doing)
        if not isinstance(reply.message, wanted):
            raise HetrlError(f"{to}: answered {type(reply.message).__name__}, which nobody asked for")
        return reply.message, reply.buffers


@dataclass(frozen=True)
class Learner:
    """Trains the policy with the experiment's algorithm."""

    policy: Policy
    algorithm: AlgorithmSection
    pad_token: int

    async def scored(self, groups: Sequence[PromptGroup], step: int, seconds: dict[str, float]) -> dict[str, Any]:
        """Return the arrays of a batch, scored by the reference where there is one; into `seconds` how long it took."""
        arrays = experience(groups, self.pad_token, self.algorithm)
        if self.policy.reference:
            with timed(seconds, REFERENCE_INFERENCE):
                arrays["reference_logprobs"] = await self.policy.logprobs(self.policy.reference, arrays, step)
        return arrays

    async def learn(
        self,
        arrays: dict[str, Any],
        groups: Sequence[PromptGroup],
        step: int,
        version: int,
        seconds: dict[str, float],
    ) -> dict[str, float]:
        """Take every optimiser step of an iteration; return what they measured, and into `seconds` how long it took.

        `arrays` are what `scored` made of `groups`. The weights at the start are those of `version`. Where the
        algorithm asks for it, the trainer scores the batch under them first: its training takes these seconds too.
        """
        with timed(seconds, ACTOR_TRAINING):
            if self.algorithm.scores_batch:
                with timed(seconds, OLD_LOGPROBS):
                    arrays["old_logprobs"] = await self.policy.logprobs({self.policy.trainer: 1}, arrays, step)
            batch, seen = training_batch(arrays, groups, version, self.algorithm)
            measured = await self._optimise(batch, step)
        return {**measured, **seen}

    async def _optimise(self, batch: Mapping[str, Any], step: int) -> dict[str, float]:
        """Take the optimiser steps and return the means of what they measured; of the mismatch, what the first did.

        A minibatch without a token to train on, as of truncated samples alone, is skipped with a warning.
        """
        algorithm, measured = self.algorithm, []
        settings = loss_settings(algorithm)
        parts = [part for part in minibatches(batch, algorithm.minibatches, algorithm) if part["mask"].any()]
        if len(parts) < algorithm.minibatches:
            skipped = algorithm.minibatches - len(parts)
            log.warning("step %d: %d minibatches have no token to train on and are skipped", step, skipped)
        if not parts:
            return {}
        for number, part in enumerate(parts * algorithm.epochs):
            sent = {name: array for name, array in part.items() if number == 0 or name not in _OF_THE_FIRST_STEP}
            measured.append(await self.policy.train(sent, settings, step))
        rows = {name: [row[name] for row in measured if name in row] for name in measured[0]}
        means = {name: sum(values) / len(values) for name, values in rows.items()}
        fresh, mismatch = means.pop("fresh", 0.0), means.pop("mismatch", 0.0)  # both over all tokens of the minibatch
        return {**means, "mismatch": mismatch / fresh} if fresh else means


@contextmanager
def timed(seconds: dict[str, float], task: str) -> Iterator[None]:
    """Note how long the body takes."""
    start = time.monotonic()
    yield
    seconds[task] = time.monotonic() - start
