"""The receivers of a version: what goes to them, who is left out of it, and the word of each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from msgspec import structs

from hetrl.errors import HetrlError
from hetrl.runtime import wire
from hetrl.runtime.transport.chunks import Buffer
from hetrl.runtime.transport.member import DeadlineError, Envelope, Member

APPLY_SECONDS = 600.0
SLOWEST_BYTES_PER_S = 1e8  # of writing, hashing and loading a version: a file system over the network


class RefusedError(HetrlError):
    """A receiver refused a version, or computed another digest: it keeps and serves what it has."""


class Party:
    """Those that get a version; `left_out` has the cause of each that is not among them any more.

    Who takes nothing for too long is left out as long as `least` remain (None: nobody is), else the version fails. All
    that they get goes through one channel, behind other weights if it `gives_way`: what is left of a version that
    somebody missed does not overtake the next.
    """

    def __init__(self, member: Member, receivers: Iterable[str], *, gives_way: bool, least: int | None) -> None:
        self._member, self._gives_way, self._least = member, gives_way, least
        self._channel = wire.priority_of(wire.WeightsBegin(version=0, gives_way=gives_way))
        self.present = [*receivers]
        self.left_out: dict[str, str] = {}

    def unreachable(self) -> dict[str, str]:
        """Return whose link is out, with that as the cause."""
        out = (one for one in self.present if self._member.links.are_out(one))
        return {one: f"the link to {wire.site_of(one)} is out" for one in out}

    def leave_out(self, causes: Mapping[str, str]) -> None:
        """Send some nothing more; what is under way to them is dropped, what they were asked fails."""
        for receiver, cause in causes.items():
            self.present.remove(receiver)
            self.left_out[receiver] = cause
            self._member.abandon(receiver, self._channel, cause)

    def open_bytes(self, receiver: str) -> int:
        """Return the bytes that a receiver has not taken out."""
        return self._member.open_bytes(receiver, self._channel)

    async def send(self, to: Sequence[str], message: wire.TravellingWeights, buffers: Sequence[Buffer] = ()) -> None:
        """Send something to those of some that are present."""
        while present := [one for one in to if one in self.present]:
            try:
                await self._member.send(present, structs.replace(message, gives_way=self._gives_way), buffers)
                return
            except DeadlineError as error:
                stuck = {one: str(error) for one in error.stuck if one in self.present}
                if not stuck or self._least is None or len(self.present) - len(stuck) < self._least:
                    raise
                self.leave_out(stuck)

    async def word_of(
        self, receiver: str, version: int, digest: str, pieces: Iterable[wire.WeightsTensor], *, load: bool = True
    ) -> wire.WeightsApplied:
        """Close a version of these pieces at a receiver; return its word that it applied it, all bits proven.

        Raises RefusedError, RunAborted, or another HetrlError where it failed or says nothing.
        """
        sizes = {message.tensor.name: message.tensor.bytes for message in pieces}
        end = wire.WeightsEnd(
            version=version,
            tensors=len(sizes),
            bytes=sum(sizes.values()),
            digest=digest,
            gives_way=self._gives_way,
            load=load,
        )
        seconds, doing = APPLY_SECONDS + end.bytes / SLOWEST_BYTES_PER_S, f"apply weight version {version}"
        reply = await self._member.request(receiver, end, timeout_seconds=seconds, doing=doing)
        match reply:
            case Envelope(message=wire.WeightsApplied(digest=arrived) as applied) if arrived == digest:
                return applied
        raise RefusedError(_refusal(reply.message, end))


def _refusal(answer: wire.Message, end: wire.WeightsEnd) -> str:
    match answer:
        case wire.WeightsApplied(digest=arrived):
            return f"weight version {end.version} arrived as {arrived}, sent as {end.digest}"
        case wire.WeightsRejected(cause=cause):
            return f"refused weight version {end.version}: {cause}"
        case other:
            return f"answered {type(other).__name__} to weight version {end.version}"
