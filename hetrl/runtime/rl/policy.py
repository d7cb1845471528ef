"""The policy as the controller sees it: score, train and publish requests to the Megatron tasks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hetrl.errors import HetrlError
from hetrl.runtime import wire
from hetrl.runtime.transport.member import Envelope, Member
from hetrl.runtime.wire.arrays import pack, unpack

SCORE_SECONDS = 3600.0
TRAIN_SECONDS = 3600.0
PUBLISH_SECONDS = 3600.0
SAVE_SECONDS = 3600.0


@dataclass(frozen=True)
class Policy:
    """The addresses of the actor's trainer and of those that receive its weights."""

    member: Member
    trainer: str
    replicas: tuple[str, ...]
    reference: str | None
    temperature: float

    async def logprobs(self, task: str, arrays: Mapping[str, NDArray[Any]], step: int) -> NDArray[np.float32]:
        """Return the log-probs [n, s] of a batch under the weights of a Megatron task, given by its address."""
        specs, buffers = pack({name: arrays[name] for name in ("tokens", "lengths")})
        request = wire.Score(step=step, what="logprobs", temperature=self.temperature, arrays=specs)
        reply = await self.member.request(
            task, request, buffers, timeout_seconds=SCORE_SECONDS, doing=f"step {step}: log-probs"
        )
        if not isinstance(reply.message, wire.Scored):
            raise _unexpected(task, reply)
        scores: NDArray[np.float32] = unpack(reply.message.arrays, reply.buffers)["scores"]
        return scores

    async def train(
        self, arrays: Mapping[str, NDArray[Any]], loss: str, hyper: Mapping[str, float | str], step: int
    ) -> dict[str, float]:
        """Make one optimiser step and return what it measured."""
        specs, buffers = pack(arrays)
        request = wire.Train(step=step, loss=loss, hyper=dict(hyper), arrays=specs)
        reply = await self.member.request(
            self.trainer, request, buffers, timeout_seconds=TRAIN_SECONDS, doing=f"step {step}: train"
        )
        if not isinstance(reply.message, wire.Trained):
            raise _unexpected(self.trainer, reply)
        return reply.message.metrics

    async def save(self, step: int, version: int, keep: int) -> wire.Saved:
        """Write a checkpoint after a step and return where it lies."""
        request = wire.Save(step=step, version=version, keep=keep)
        doing = f"checkpoint after step {step}"
        reply = await self.member.request(self.trainer, request, timeout_seconds=SAVE_SECONDS, doing=doing)
        if not isinstance(reply.message, wire.Saved):
            raise _unexpected(self.trainer, reply)
        return reply.message

    async def publish(self, version: int, receivers: Sequence[str]) -> wire.Published:
        """Send the current weights as `version`; returns when every receiver serves them."""
        request = wire.Publish(version=version, receivers=tuple(receivers))
        doing = f"publish weight version {version}"
        reply = await self.member.request(self.trainer, request, timeout_seconds=PUBLISH_SECONDS, doing=doing)
        if not isinstance(reply.message, wire.Published):
            raise _unexpected(self.trainer, reply)
        return reply.message


def _unexpected(member: str, reply: Envelope) -> HetrlError:
    return HetrlError(f"{member}: answered {type(reply.message).__name__}, which nobody asked for")
