"""Everything that crosses between the members of a run: one schema.

A message is a sequence of frames: a `Header`, one of the `Message` structs (both msgpack, by msgspec) and any
number of raw buffers (tensor bytes) that the message describes. Nothing is unpickled.

What members tell each other travels in channels: struct and buffers, one after the other, are cut into chunks, and each
chunk is a header and its bytes (`transport.chunks`). What gateways say or hear, and the bookkeeping of the channels
themselves, is a header and a struct.

Members have addresses `site/role/instance`: `alpha/controller/0`, `alpha/actor_training/0` (rank 0 of the world of that
role), `beta/actor_generation/2` (the replica's number in the plan). A header may name several receivers: every site
among them gets the message once and its gateway hands it to each receiver there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import msgspec

from hetrl.runtime.wire.control import (
    Abort as Abort,
    Acknowledged as Acknowledged,
    Ballast as Ballast,
    ControlMessage,
    Done as Done,
    Echo as Echo,
    EchoReply as EchoReply,
    Failed as Failed,
    Finish as Finish,
    GatewayEnded as GatewayEnded,
    Go as Go,
    Heartbeat as Heartbeat,
    Hello as Hello,
    Join as Join,
    LinkCounters as LinkCounters,
    LinkMeasured as LinkMeasured,
    LinkOut as LinkOut,
    LinkRestored as LinkRestored,
    LinkStats as LinkStats,
    LinkStatsReply as LinkStatsReply,
    Measure as Measure,
    Probe as Probe,
    Undeliverable as Undeliverable,
)
from hetrl.runtime.wire.copies import (
    CheckpointListed as CheckpointListed,
    CheckpointRead as CheckpointRead,
    CheckpointTaken as CheckpointTaken,
    CopyMessage,
    FindCheckpoints as FindCheckpoints,
    FoundCheckpoints as FoundCheckpoints,
    LendCheckpoint as LendCheckpoint,
    ListCheckpoint as ListCheckpoint,
    ReadCheckpoint as ReadCheckpoint,
    TakeCheckpoint as TakeCheckpoint,
)
from hetrl.runtime.wire.group import (
    GroupMessage,
    StoreAnswer as StoreAnswer,
    StoreAsk as StoreAsk,
    WanFailed as WanFailed,
    WanPiece as WanPiece,
    WanProbe as WanProbe,
    WanProbed as WanProbed,
    WanReady as WanReady,
)
from hetrl.runtime.wire.header import (
    NO_ANSWER as NO_ANSWER,
    WIRE_FORMAT as WIRE_FORMAT,
    ArraySpec as ArraySpec,
    Header as Header,
    Place as Place,
    Priority as Priority,
    Tagged as Tagged,
)
from hetrl.runtime.wire.versions import (
    CatchUp as CatchUp,
    Exported as Exported,
    FinishPublish as FinishPublish,
    Publish as Publish,
    Published as Published,
    TensorSpec as TensorSpec,
    TravellingWeights as TravellingWeights,
    WeightMessage,
    WeightsApplied as WeightsApplied,
    WeightsBegin as WeightsBegin,
    WeightsEnd as WeightsEnd,
    WeightsRejected as WeightsRejected,
    WeightsTensor as WeightsTensor,
)
from hetrl.runtime.wire.work import (
    WORK_SECONDS as WORK_SECONDS,
    FinishSave as FinishSave,
    Generate as Generate,
    Generated as Generated,
    LossSettings as LossSettings,
    Restore as Restore,
    Restored as Restored,
    Sample as Sample,
    Sampling as Sampling,
    Save as Save,
    Saved as Saved,
    Score as Score,
    Scored as Scored,
    Sleep as Sleep,
    Train as Train,
    Trained as Trained,
    VersionSpan as VersionSpan,
    Wake as Wake,
    Withdraw as Withdraw,
    WorkMessage,
)

Message = ControlMessage | WorkMessage | WeightMessage | GroupMessage | CopyMessage

# The channel of each type that is neither control nor weights; messages of one channel arrive in order.
_PRIORITIES: dict[type[Tagged], Priority] = {
    Ballast: Priority.DATA,
    Generate: Priority.DATA,
    Generated: Priority.DATA,
    Withdraw: Priority.DATA,
    Score: Priority.DATA,
    Scored: Priority.DATA,
    Train: Priority.DATA,
    Trained: Priority.DATA,
    Save: Priority.DATA,
    Restored: Priority.DATA,
    WanPiece: Priority.DATA,
    CheckpointRead: Priority.BACKGROUND,
}

# Of a header, room for some six thousand receivers, and of a message's struct: what a peer can make a receiver decode.
HEADER_BYTES, STRUCT_BYTES = 2**18, 2**22

# The roles of members without a task.
GATEWAY, CONTROLLER, PROBE, KEEPER = "gateway", "controller", "probe", "keeper"
RANK = ".rank"  # what the roles of a world's ranks add to the name of their task

_Read = TypeVar("_Read")
_encoder = msgspec.msgpack.Encoder()
_header_decoder = msgspec.msgpack.Decoder(Header)
_message_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def encode(header: Header, message: Message) -> list[bytes]:
    """Return the first two frames of a message."""
    return [_encoder.encode(header), _encoder.encode(message)]


def encode_struct(struct: Header | Message) -> bytes:
    """Return a header as the first frame of a chunk, or a message as the struct that is cut into chunks."""
    return _encoder.encode(struct)


def decode_header(frame: bytes | memoryview) -> Header:
    """Read a header; raises msgspec.MsgspecError on anything else, a foreign format included."""
    header = _read(_header_decoder, frame, HEADER_BYTES)
    if header.format != WIRE_FORMAT:
        raise msgspec.ValidationError(f"wire format {header.format!r}, expected {WIRE_FORMAT!r}")
    return header


def decode_message(frame: bytes | memoryview) -> Message:
    """Read a message; raises msgspec.MsgspecError on anything that is not one of the schema."""
    return _read(_message_decoder, frame, STRUCT_BYTES)


def _read(decoder: msgspec.msgpack.Decoder[_Read], frame: bytes | memoryview, most_bytes: int) -> _Read:
    if (size_bytes := memoryview(frame).nbytes) > most_bytes:
        raise msgspec.ValidationError(f"{size_bytes} bytes, where at most {most_bytes} are expected")
    try:
        return decoder.decode(frame)
    except RecursionError:  # arrays in arrays, which the decoder skips while it looks for the type
        raise msgspec.DecodeError("nested too deeply") from None


def priority_of(message: Message) -> Priority:
    """Return the channel that a message travels in."""
    if isinstance(message, TravellingWeights):
        return Priority.LATER_WEIGHTS if message.gives_way else Priority.WEIGHTS
    return _PRIORITIES.get(type(message), Priority.CONTROL)


def address(site: str, role: str, instance: int = 0) -> str:
    """Return the address of a member."""
    return f"{site}/{role}/{instance}"


def site_of(member: str) -> str:
    """Return the site of a member's address."""
    return member.split("/", 1)[0]


def role_of(member: str) -> str:
    """Return the role of a member's address; empty where it has none."""
    return member.split("/", 2)[1] if "/" in member else ""


def gateway_of(site: str) -> str:
    """Return the address of the gateway of a site."""
    return address(site, GATEWAY)


def is_gateway(member: str) -> bool:
    """Whether an address is that of a gateway."""
    return member == gateway_of(site_of(member))


def by_site(receivers: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Group receivers by site, order kept."""
    groups: dict[str, list[str]] = {}
    for receiver in receivers:
        groups.setdefault(site_of(receiver), []).append(receiver)
    return {site: tuple(members) for site, members in groups.items()}
