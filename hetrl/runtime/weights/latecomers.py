"""Members that are behind are brought to the newest version, at their own pace, beside the versions of all others.

until all of them have it, those that lack most first:
    what changed since the version that they proved, a delta at a time, of which the last one is loaded
    the full set, where that is not known any more, or was refused: as it is kept then, whatever is published meanwhile;
    once more where it was refused, too
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from hetrl.errors import HetrlError
from hetrl.runtime import wire
from hetrl.runtime.transport.member import Member, RunAborted
from hetrl.runtime.weights.kept import Delta, Kept
from hetrl.runtime.weights.party import Party, RefusedError

_POLL_SECONDS = 0.05
_NOTHING = -1  # a version before all others


class Latecomers:
    """Serves one `CatchUp`, none of whose receivers is sent anything else meanwhile."""

    def __init__(self, member: Member, request: wire.CatchUp, kept: Kept) -> None:
        self._member, self._request, self._kept = member, request, kept
        self._party = Party(member, request.receivers, gives_way=request.gives_way, least=0)
        self._applied, self._failed, self._repaired = dict[str, float](), dict[str, str](), dict[str, str]()
        self._refused_whole = set[str]()
        self._version, self._digest, self._bytes = request.version, "", 0  # of what was brought last
        for receiver in request.receivers:  # who lacks what it proved was started again
            if kept.proven.get(receiver, _NOTHING) >= request.version:
                del kept.proven[receiver]

    async def bring(self) -> wire.Published:
        """Bring all to the newest version; those that fail, and those whose link goes out, are named in the answer."""
        start = time.monotonic()
        self._kept.behind |= {*self._party.present}
        try:
            with self._leaving_out():
                while behind := await self._behind():
                    await self._next_version(behind)
        finally:
            self._kept.behind -= {*self._request.receivers} - {*self._party.left_out}
            self._kept.settle()
        return wire.Published(
            version=self._version,
            digest=self._digest,
            bytes=self._bytes,
            seconds=time.monotonic() - start,
            apply_seconds={one: self._applied.get(one, 0.0) for one in self._party.present},
            failed=self._failed,
            left_out=self._party.left_out,
            repaired=self._repaired,
        )

    @contextmanager
    def _leaving_out(self) -> Iterator[None]:
        """Leave receivers out whose link is out, or goes out."""

        def look(_: str | None = None) -> None:
            self._party.leave_out(self._party.unreachable())

        with self._member.links.told(look):
            look()
            yield

    async def _behind(self) -> list[str]:
        """Return the receivers that lack most of the newest version, once one that will do is kept."""
        kept = self._kept
        while (newest := kept.version) is None or newest < self._request.version:
            if not self._party.present:
                return []
            await asyncio.sleep(_POLL_SECONDS)
        self._version = newest
        has = {one: kept.proven.get(one, _NOTHING) for one in self._party.present}
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
        await self._party.send(to, begin)
        for message, data in delta.pieces:
            await self._party.send(to, message, [data])
        refused = await self._close(to, delta.version, delta.digest, [one for one, _ in delta.pieces], load=load)
        for receiver, cause in refused.items():
            self._repaired[receiver] = cause
            self._kept.proven.pop(receiver, None)

    async def _send_whole(self, to: Sequence[str]) -> None:
        with self._kept.anchor() as anchor:
            if anchor is None:
                return
            await self._party.send(to, wire.WeightsBegin(version=anchor.version))
            for message in anchor.messages:
                await self._party.send(to, message, [anchor.read(message)])
            refused = await self._close(to, anchor.version, anchor.digest, anchor.messages, load=True)
        for receiver, cause in refused.items():
            if receiver in self._refused_whole:
                self._give_up(receiver, f"{receiver}: {cause}")
            else:  # one that counted on another of its node takes the next one by itself
                self._refused_whole.add(receiver)
                self._repaired[receiver] = cause

    async def _close(
        self, to: Sequence[str], version: int, digest: str, pieces: Sequence[wire.WeightsTensor], *, load: bool
    ) -> dict[str, str]:
        """Wait for the word of each; return why some refused the version."""
        self._digest, self._bytes = digest, sum(message.bytes for message in pieces)
        refused: dict[str, str] = {}

        async def close(receiver: str) -> None:
            try:
                applied = await self._party.word_of(receiver, version, digest, pieces, load=load)
                self._applied[receiver], self._kept.words[receiver] = applied.seconds, applied
                self._kept.proven[receiver] = version
            except RunAborted:
                raise
            except RefusedError as refusal:
                refused[receiver] = str(refusal)
            except HetrlError as error:
                self._give_up(receiver, str(error))

        await asyncio.gather(*(close(one) for one in to if one in self._party.present))
        return refused

    def _give_up(self, receiver: str, cause: str) -> None:
        if receiver in self._party.present:  # else it was left out, and has what it had
            self._kept.proven.pop(receiver, None)
            self._party.present.remove(receiver)
            self._failed[receiver] = cause
