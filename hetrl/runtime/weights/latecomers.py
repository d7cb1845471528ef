"""Members that are behind are brought to the newest version, at their own pace, beside the versions of all others.

until all of them have it, those that lack most first:
    what changed since the version that they proved, a delta at a time, of which the last one is loaded
    the full set, where that is not known any more, or was refused: as it is kept then, whatever is published meanwhile
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from msgspec import structs

from hetrl.errors import HetrlError
from hetrl.runtime import wire
from hetrl.runtime.transport.member import Member, RunAborted
from hetrl.runtime.weights.kept import Delta, Kept
from hetrl.runtime.weights.word import RefusedError, word_on

_POLL_SECONDS = 0.05
_NOTHING = -1  # a version before all others


class Latecomers:
    """Serves one `CatchUp`, none of whose receivers is sent anything else meanwhile."""

    def __init__(self, member: Member, request: wire.CatchUp, kept: Kept) -> None:
        self._member, self._request, self._kept = member, request, kept
        self._receivers = [*request.receivers]
        self._applied, self._failed, self._repaired = dict[str, float](), dict[str, str](), dict[str, str]()
        self._left_out: dict[str, str] = {}
        self._version, self._digest, self._bytes = request.version, "", 0  # of what was brought last
        for receiver in request.receivers:  # who lacks what it proved was started again
            if kept.proven.get(receiver, _NOTHING) >= request.version:
                del kept.proven[receiver]

    async def bring(self) -> wire.Published:
        """Bring all to the newest version; those that fail, and those whose link goes out, are named in the answer."""
        start = time.monotonic()
        self._kept.behind |= {*self._receivers}
        try:
            with self._leaving_out():
                while behind := await self._behind():
                    await self._next_version(behind)
        finally:
            self._kept.behind -= {*self._request.receivers} - {*self._left_out}
            self._kept.settle()
        return wire.Published(
            version=self._version,
            digest=self._digest,
            bytes=self._bytes,
            seconds=time.monotonic() - start,
            apply_seconds={one: self._applied.get(one, 0.0) for one in self._receivers},
            failed=self._failed,
            left_out=self._left_out,
            repaired=self._repaired,
        )

    @contextmanager
    def _leaving_out(self) -> Iterator[None]:
        """Leave receivers out whose link is out, or goes out."""
        # One channel for all that a receiver gets: what is left of a version that it missed does not overtake the next.
        channel = wire.priority_of(wire.WeightsBegin(version=0, gives_way=self._request.gives_way))

        def look(_: str | None = None) -> None:
            for receiver in [one for one in self._receivers if self._member.links.are_out(one)]:
                cause = f"the link to {wire.site_of(receiver)} is out"
                self._receivers.remove(receiver)
                self._left_out[receiver] = cause
                self._member.abandon(receiver, channel, cause)

        with self._member.links.told(look):
            look()
            yield

    async def _behind(self) -> list[str]:
        """Return the receivers that lack most of the newest version, once one that will do is kept."""
        kept = self._kept
        while (newest := kept.version) is None or newest < self._request.version:
            if not self._receivers:
                return []
            await asyncio.sleep(_POLL_SECONDS)
        self._version = newest
        has = {one: kept.proven.get(one, _NOTHING) for one in self._receivers}
        lacking = {one: version for one, version in has.items() if version != newest}
        oldest = min(lacking.values(), default=_NOTHING)
        return [one for one, version in lacking.items() if version == oldest]

    async def _next_version(self, to: Sequence[str]) -> None:
        """Bring receivers that have the same version a version further, or to the one that is kept."""
        if deltas := self._kept.since(self._kept.proven.get(to[0])):
            await self._send_delta(to, deltas[0], load=len(deltas) == 1)
        else:
            await self._send_whole(to)

    async def _send_delta(self, to: Sequence[str], delta: Delta, *, load: bool) -> None:
        begin = wire.WeightsBegin(
            version=delta.version, encoding="delta", base_version=delta.base, base_digest=delta.base_digest
        )
        await self._send(to, begin)
        for message, data in delta.pieces:
            await self._send(to, message, data)
        refused = await self._close(to, delta.version, delta.digest, [one for one, _ in delta.pieces], load=load)
        for receiver, cause in refused.items():
            self._repaired[receiver] = cause
            self._kept.proven.pop(receiver, None)

    async def _send_whole(self, to: Sequence[str]) -> None:
        with self._kept.anchor() as anchor:
            if anchor is None:
                return
            await self._send(to, wire.WeightsBegin(version=anchor.version))
            for message in anchor.messages:
                await self._send(to, message, anchor.read(message))
            refused = await self._close(to, anchor.version, anchor.digest, anchor.messages, load=True)
        for receiver, cause in refused.items():
            self._give_up(receiver, f"{receiver}: {cause}")

    async def _close(
        self, to: Sequence[str], version: int, digest: str, pieces: Iterable[wire.WeightsTensor], *, load: bool
    ) -> dict[str, str]:
        """Wait for the word of each; return why some refused the version."""
        sizes = {message.tensor.name: message.tensor.bytes for message in pieces}
        self._digest, self._bytes = digest, sum(sizes.values())
        end = wire.WeightsEnd(
            version=version,
            tensors=len(sizes),
            bytes=self._bytes,
            digest=digest,
            gives_way=self._request.gives_way,
            load=load,
        )
        refused: dict[str, str] = {}

        async def close(receiver: str) -> None:
            try:
                self._applied[receiver] = await word_on(self._member, receiver, end)
                self._kept.proven[receiver] = version
            except RunAborted:
                raise
            except RefusedError as refusal:
                refused[receiver] = str(refusal)
            except HetrlError as error:
                self._give_up(receiver, str(error))

        await asyncio.gather(*(close(one) for one in to if one in self._receivers))
        return refused

    def _give_up(self, receiver: str, cause: str) -> None:
        self._kept.proven.pop(receiver, None)
        if receiver in self._receivers:  # else it was left out
            self._receivers.remove(receiver)
            self._failed[receiver] = cause

    async def _send(self, to: Sequence[str], message: wire.TravellingWeights, data: bytes | None = None) -> None:
        if present := [one for one in to if one in self._receivers]:
            message = structs.replace(message, gives_way=self._request.gives_way)
            await self._member.send(present, message, () if data is None else [data])
