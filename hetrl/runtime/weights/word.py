"""The word of a receiver on a version that it got: applied, refused, or failed."""

from __future__ import annotations

from hetrl.errors import HetrlError
from hetrl.runtime import wire
from hetrl.runtime.transport.member import Envelope, Member

APPLY_SECONDS = 600.0
SLOWEST_BYTES_PER_S = 1e8  # of writing, hashing and loading a version: a file system over the network


class RefusedError(HetrlError):
    """A receiver refused a version, or computed another digest: it keeps and serves what it has."""


async def word_on(member: Member, receiver: str, end: wire.WeightsEnd) -> float:
    """Close a version at a receiver; return the seconds that it took to apply it, all bits proven.

    Raises RefusedError, RunAborted, or another HetrlError where it failed or says nothing.
    """
    seconds, doing = APPLY_SECONDS + end.bytes / SLOWEST_BYTES_PER_S, f"apply weight version {end.version}"
    reply = await member.request(receiver, end, timeout_seconds=seconds, doing=doing)
    match reply:
        case Envelope(message=wire.WeightsApplied(digest=arrived, seconds=took)) if arrived == end.digest:
            return took
    raise RefusedError(_refusal(reply.message, end))


def _refusal(answer: wire.Message, end: wire.WeightsEnd) -> str:
    match answer:
        case wire.WeightsApplied(digest=arrived):
            return f"weight version {end.version} arrived as {arrived}, sent as {end.digest}"
        case wire.WeightsRejected(cause=cause):
            return f"refused weight version {end.version}: {cause}"
        case other:
            return f"answered {type(other).__name__} to weight version {end.version}"
