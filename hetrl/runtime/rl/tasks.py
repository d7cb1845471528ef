"""What the controller sees of the Megatron tasks: addresses that score, train, save and publish.

A member that answers something else, or scores under other weights than were asked for, ends the run by name.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from hetrl.dealing import over_replicas
from hetrl.errors import HetrlError
from hetrl.runtime import wire
from hetrl.runtime.transport.member import Member
from hetrl.runtime.wire.arrays import pack, unpack

_Answer = TypeVar("_Answer", wire.Scored, wire.Trained, wire.Saved, wire.Restored, wire.Exported, wire.Published)


@dataclass(frozen=True)
class _Found:
    """What a world scored, and under which weight version."""

    scores: NDArray[np.float32]
    version: int


@dataclass(frozen=True)
class Inference:
    """The worlds of a task that score, by address, with the share of a batch that each scores.

    `what` is logprobs, values or rewards (`wire.Score`).
    """

    member: Member
    task: str
    worlds: Mapping[str, int]
    what: str = "logprobs"
    temperature: float = 1.0

    async def scores(
        self, arrays: Mapping[str, NDArray[Any]], step: int, version: int | None = None
    ) -> NDArray[np.float32]:
        """Return the scores [n, s] of a batch; each world scores tokens in proportion to its share.

        Raises HetrlError where one scored under another weight version than `version` (None: whichever).
        """
        parts = self._parts(arrays)
        found = await self._ask(arrays, step, parts)
        if version is not None:
            self._check_versions(found, range(version, version + 1), step)
        return _whole(arrays, parts, found)

    async def newest_scores(
        self, arrays: Mapping[str, NDArray[Any]], step: int, least: int
    ) -> tuple[NDArray[np.float32], int]:
        """Return the scores of a batch under one weight version, and that version, while others may arrive.

        Where worlds took one between their answers, those that did not have it yet are asked again. Raises HetrlError
        where one scored under a version before `least`, which all have, or after what the step before gave.
        """
        newest = max(least, step - 1)
        parts, found = self._parts(arrays), dict[str, _Found]()
        while older := {world for world in parts if world not in found or found[world].version < _newest(found)}:
            found |= await self._ask(arrays, step, {world: parts[world] for world in older})
            self._check_versions(found, range(least, newest + 1), step)
        return _whole(arrays, parts, found), _newest(found)

    def _parts(self, arrays: Mapping[str, NDArray[Any]]) -> dict[str, Sequence[int]]:
        """Return the samples that each world scores, of worlds that score any."""
        parts = over_replicas(arrays["lengths"].tolist(), [*self.worlds.values()])
        return {world: part for world, part in zip(self.worlds, parts, strict=True) if part}

    def _check_versions(self, found: Mapping[str, _Found], versions: range, step: int) -> None:
        for world, one in found.items():
            if one.version not in versions:
                wanted = " to ".join(map(str, dict.fromkeys((versions[0], versions[-1]))))
                raise HetrlError(
                    f"{world}: scored under weight version {one.version}, not {wanted} ({self._doing(step)})"
                )

    def _doing(self, step: int) -> str:
        return f"step {step}: {self.task}, {self.what}"

    async def _ask(
        self, arrays: Mapping[str, NDArray[Any]], step: int, parts: Mapping[str, Sequence[int]]
    ) -> dict[str, _Found]:
        async def score(part: Sequence[int], world: str) -> _Found:
            specs, buffers = pack({name: arrays[name][[*part]] for name in ("tokens", "lengths")})
            request = wire.Score(step=step, what=self.what, temperature=self.temperature, arrays=specs)
            answer, arrived = await ask(self.member, world, request, wire.Scored, self._doing(step), buffers)
            return _Found(unpack(answer.arrays, arrived)["scores"], answer.version)

        found = await asyncio.gather(*(score(part, world) for world, part in parts.items()))
        return dict(zip(parts, found, strict=True))


def _whole(
    arrays: Mapping[str, NDArray[Any]], parts: Mapping[str, Sequence[int]], found: Mapping[str, _Found]
) -> NDArray[np.float32]:
    """Return the scores [n, s] of a batch out of those that each world found of its part."""
    scores = np.zeros(arrays["tokens"].shape, np.float32)
    for world, part in parts.items():
        scores[[*part]] = found[world].scores
    return scores


def _newest(found: Mapping[str, _Found]) -> int:
    """Return the newest weight version that worlds scored under."""
    return max(one.version for one in found.values())


@dataclass(frozen=True)
class Trainer:
    """The world that trains a model, and the members that take every version of its weights."""

    member: Member
    task: str
    address: str
    receivers: tuple[str, ...]
    encoding: str = "full"  # of its weights: full | delta
    gives_way: bool = False  # its versions, to those of another model

    async def train(
        self, arrays: Mapping[str, NDArray[Any]], settings: wire.LossSettings, step: int
    ) -> dict[str, float]:
        """Make one optimiser step and return what it measured."""
        specs, buffers = pack(arrays)
        request = wire.Train(step=step, settings=settings, arrays=specs)
        answer, _ = await self._ask(request, wire.Trained, f"step {step}: {self.task}", buffers)
        return answer.metrics

    async def save(self, step: int, version: int, progress: str, samples: bytes = b"") -> wire.Saved:
        """Begin a checkpoint after a step; it is written beside the next ones until `finish_save`."""
        request, kept = wire.Save(step=step, version=version, progress=progress), [memoryview(samples)]
        answer, _ = await self._ask(request, wire.Saved, f"checkpoint of {self.task} after step {step}", kept)
        return answer

    async def finish_save(self, request: wire.FinishSave) -> wire.Saved:
        """Complete the checkpoint of a step and keep the newest; without `wait` only if it is written already."""
        answer, _ = await self._ask(request, wire.Saved, f"checkpoint of {self.task} after step {request.step}")
        return answer

    async def restore(self, step: int) -> tuple[wire.Restored, bytes]:
        """Take up the checkpoint of a step, and return the samples kept with it; HetrlError where it cannot be read."""
        doing = f"take up the checkpoint of {self.task} after step {step}"
        answer, buffers = await self._ask(wire.Restore(step=step), wire.Restored, doing)
        return answer, bytes(buffers[0]) if buffers else b""

    async def publish(
        self, version: int, receivers: Sequence[str] | None = None, *, quorum: int | None = None
    ) -> wire.Published:
        """Send the current weights as `version` to its receivers, or to others; returns when all of them have it.

        Raises what `export` and `published` raise.
        """
        await self.export(version, receivers, quorum=quorum)
        return await self.published(version, quorum=quorum)

    async def export(
        self,
        version: int,
        receivers: Sequence[str] | None = None,
        *,
        quorum: int | None = None,
        patience_seconds: float | None = None,
    ) -> wire.Exported:
        """Begin to send the current weights as `version`; returns as soon as they may become others.

        With a `quorum` receivers may fail, and those are left out whose link is out, or that take longer than
        `patience_seconds`; it is an error then that fewer are left. A version that the trainer keeps from the last time
        is sent as it was, whatever the weights are by now.
        """
        request = wire.Publish(
            version=version,
            receivers=self.receivers if receivers is None else tuple(receivers),
            quorum=quorum,
            patience_seconds=patience_seconds,
            encoding=self.encoding,
            gives_way=self.gives_way,
        )
        answer, _ = await self._ask(request, wire.Exported, f"export version {version} of {self.task}")
        return answer

    async def published(self, version: int, *, quorum: int | None = None) -> wire.Published:
        """Return what came of a version that was exported, once that is known of all receivers.

        Raises HetrlError for those that could not take it, where no `quorum` is enough.
        """
        doing = f"publish version {version} of {self.task}"
        answer, _ = await self._ask(wire.FinishPublish(version=version), wire.Published, doing)
        if answer.failed and quorum is None:
            raise HetrlError("; ".join(answer.failed.values()))
        return answer

    async def catch_up(self, version: int, receivers: Sequence[str]) -> wire.Published:
        """Bring receivers that are behind to a version, or a later one; returns when they have it, or failed."""
        request = wire.CatchUp(version=version, receivers=tuple(receivers), gives_way=self.gives_way)
        answer, _ = await self._ask(request, wire.Published, f"bring replicas to version {version} of {self.task}")
        return answer

    async def _ask(
        self, request: wire.Message, wanted: type[_Answer], doing: str, buffers: Sequence[memoryview] = ()
    ) -> tuple[_Answer, Sequence[memoryview]]:
        return await ask(self.member, self.address, request, wanted, doing, buffers)


async def ask(
    member: Member,
    to: str,
    request: wire.Message,
    wanted: type[_Answer],
    doing: str,
    buffers: Sequence[memoryview] = (),
) -> tuple[_Answer, Sequence[memoryview]]:
    """Return an answer of the type that is wanted, and its buffers; raises HetrlError for another one."""
    reply = await member.request(to, request, buffers, timeout_seconds=wire.WORK_SECONDS, doing=doing)
    if not isinstance(reply.message, wanted):
        raise HetrlError(f"{to}: answered {type(reply.message).__name__}, which nobody asked for ({doing})")
    return reply.message, reply.buffers
