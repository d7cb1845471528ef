"""Everything that crosses between the members of a run: one schema.

A message is a sequence of frames: a `Header`, one of the `Message` structs (both msgpack, by msgspec) and any
number of raw buffers (tensor bytes) that the message describes. Nothing is unpickled.

What members tell each other travels in channels: struct and buffers, one after the other, are cut into chunks, and each
chunk is a header and its bytes (`hetrl.runtime.chunks`). What gateways say or hear, and the bookkeeping of the channels
themselves, is a header and a struct.

Members have addresses `site/role/instance`: `alpha/controller/0`, `alpha/actor_training/0` (rank 0 of the world of that
role), `beta/actor_generation/2` (the replica's number in the plan). A header may name several receivers: every site
among them gets the message once and its gateway hands it to each receiver there.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import msgspec

WIRE_FORMAT = "hetrl-wire/1"
NO_ANSWER = 0  # the id of a message whose source wants no word about it, not even Undeliverable


class Priority(enum.IntEnum):
    """The three channels between two members; a gateway sends the first ahead of the others."""

    CONTROL = 0
    DATA = 1
    WEIGHTS = 2


class Place(msgspec.Struct, frozen=True):
    """Where a chunk stands in the channel to one receiver: the stream counts how often the channel began anew."""

    stream: int
    sequence: int


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """Who speaks to whom; `reply_to` carries the `id` of the request that is answered.

    `incarnation` tells the lives of one address apart. A chunk has a place per receiver in `to`, and on the first chunk
    of a message `sizes` are the bytes of its struct and of each buffer. What has no place is outside the channels.
    """

    run: str
    source: str
    to: tuple[str, ...]
    id: int
    reply_to: int | None = None
    format: str = WIRE_FORMAT
    incarnation: int = 0
    priority: Priority = Priority.CONTROL
    places: tuple[Place, ...] = ()
    sizes: tuple[int, ...] = ()


class ArraySpec(msgspec.Struct, frozen=True):
    """How to read one buffer: a C-contiguous array of little-endian `dtype` (numpy or torch name) and `shape`."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class Tagged(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """A message; its class name is its type on the wire."""


# ---- membership


class Join(Tagged, frozen=True, tag=True):
    """A member is up and ready to work (READY); `engines` are name -> version of what it runs."""

    ranks: int
    host: str
    pid: int
    engines: dict[str, str]


class Go(Tagged, frozen=True, tag=True):
    """The run goes on with these members; `epoch` counts changes of membership, `left` says who went and why."""

    epoch: int
    members: tuple[str, ...]
    left: dict[str, str] = {}


class Heartbeat(Tagged, frozen=True, tag=True):
    """A member lives."""


class Abort(Tagged, frozen=True, tag=True):
    """The run ends at once; `cause` says what, where and what next."""

    cause: str


class Finish(Tagged, frozen=True, tag=True):
    """The run is complete: close and exit with 0."""


class Failed(Tagged, frozen=True, tag=True):
    """The answer to a request that could not be fulfilled, or a member's last word; the exit code is its kind."""

    cause: str
    exit_code: int = 1


class Done(Tagged, frozen=True, tag=True):
    """The plain answer to a request without results."""


class Undeliverable(Tagged, frozen=True, tag=True):
    """A message could not be handed over; `receiver`, a member or a whole site, is unknown or not connected."""

    receiver: str
    cause: str


# ---- channels


class Hello(Tagged, frozen=True, tag=True):
    """A member to its gateway: this connection is mine, for control messages or for the rest; my counters so far."""

    bulk: bool
    chunks_resent: int = 0
    chunks_duplicate: int = 0


class Acknowledged(Tagged, frozen=True, tag=True):
    """What a receiver has of one stream: chunks below `cumulative` and in the half-open `ranges`; bytes it took out.

    `incarnation` is the sender's that it speaks of, `answers` the `Probe` that asked (0: nobody did).
    """

    priority: Priority
    incarnation: int
    stream: int
    cumulative: int
    ranges: tuple[tuple[int, int], ...]
    taken_bytes: int
    answers: int = 0


class Probe(Tagged, frozen=True, tag=True):
    """What have you got of this stream? It queues behind the chunks that it asks about."""

    stream: int
    number: int


class LinkRestored(Tagged, frozen=True, tag=True):
    """A gateway to its members: the link to this site was lost and is back, and what was under way may be lost."""

    site: str


# ---- links


class LinkCounters(msgspec.Struct, frozen=True, kw_only=True):
    """What a gateway sent to and received from another site since its start: messages, and the bytes of their frames.

    `seconds_sending`: with something in its queues; `round_trip_seconds`: of a small message, smoothed, None while
    unknown; `reconnects`: connections that came back; `chunks_dropped`: for want of room in the queue;
    `peak_queued_bytes`: the most that ever waited, control messages and the rest each at its own time.
    """

    messages_sent: int = 0
    bytes_sent: int = 0
    messages_received: int = 0
    bytes_received: int = 0
    seconds_sending: float = 0.0
    round_trip_seconds: float | None = None
    reconnects: int = 0
    chunks_dropped: int = 0
    peak_queued_bytes: int = 0


class LinkStats(Tagged, frozen=True, tag=True):
    """To a gateway (`site/gateway/0`): what crossed your links so far? Answered by `LinkStatsReply`."""


class LinkStatsReply(Tagged, frozen=True, tag=True):
    """Counters per other site and of the gateway as a whole, since its start.

    Connections refused for their key, malformed messages dropped, connections that never got through the handshake,
    for whatever reason; chunks dropped because a member's queue was full, sent again by members, and dropped by members
    that had them already; the most bytes that ever waited for each member of the gateway's site.
    """

    links: dict[str, LinkCounters]
    refused: int
    malformed: int
    not_admitted: int = 0
    chunks_dropped: int = 0
    chunks_resent: int = 0
    chunks_duplicate: int = 0
    peak_queued_bytes: dict[str, int] = {}


class Echo(Tagged, frozen=True, tag=True):
    """Between gateways: a sign of life; `seconds` is the clock of who asked, and comes back in the `EchoReply`."""

    seconds: float


class EchoReply(Tagged, frozen=True, tag=True):
    """The answer to an `Echo`, with the seconds that it carried."""

    seconds: float


# ---- measuring links (`hetrl.runtime.probe`)


class Measure(Tagged, frozen=True, tag=True):
    """To a probe: measure the way to the probe `target` for so long; answered by `LinkMeasured`."""

    target: str
    round_trips: int
    seconds: float


class LinkMeasured(Tagged, frozen=True, tag=True):
    """Every round trip of a small message, and the bytes that arrived in each interval under full load."""

    round_trip_seconds: tuple[float, ...]
    interval_seconds: float
    interval_bytes: tuple[int, ...]


class Ballast(Tagged, frozen=True, tag=True):
    """A load: its buffers mean nothing; answered by `Done`."""


# ---- rollouts


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How to sample: `samples` continuations of at most `max_tokens`, ended by any of `stop_tokens`; seeded."""

    samples: int
    max_tokens: int
    temperature: float
    top_p: float
    seed: int
    stop_tokens: tuple[int, ...] = ()


class Generate(Tagged, frozen=True, tag=True):
    """Sample continuations of one prompt; token ids in, token ids out."""

    group: int
    prompt: tuple[int, ...]
    sampling: Sampling


class VersionSpan(msgspec.Struct, frozen=True):
    """Tokens [start, end) of a sample were drawn under this weight version."""

    version: int
    start: int
    end: int


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One continuation: tokens, their log-probs under the sampling engine and the weight version of each token."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[VersionSpan, ...]
    finish_reason: str  # stop | length | abort


class Generated(Tagged, frozen=True, tag=True):
    """The samples of one `Generate`."""

    group: int
    samples: tuple[Sample, ...]
    seconds: float


# ---- weights


class TensorSpec(msgspec.Struct, frozen=True):
    """One tensor under its Hugging Face name, `bytes` long."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int


class Publish(Tagged, frozen=True, tag=True):
    """To a trainer: send the current weights as `version` to these members."""

    version: int
    receivers: tuple[str, ...]
    encoding: str = "full"  # full | delta


class WeightsBegin(Tagged, frozen=True, tag=True):
    """A version starts to arrive; `base_version` is the version that a delta overwrites (None: a full set)."""

    version: int
    encoding: str
    base_version: int | None = None


class WeightsTensor(Tagged, frozen=True, tag=True):
    """A piece of one tensor: the buffer holds its bytes from `offset`; `digest` (blake2b-128, hex) is of all of it."""

    version: int
    tensor: TensorSpec
    offset: int
    digest: str


class WeightsEnd(Tagged, frozen=True, tag=True):
    """All pieces of the version are sent: so many tensors, and the digest of their digests in name order."""

    version: int
    tensors: int
    bytes: int
    digest: str


class WeightsApplied(Tagged, frozen=True, tag=True):
    """A receiver serves this version from now on; `digest` is what it computed from what arrived."""

    version: int
    digest: str
    seconds: float


class WeightsRejected(Tagged, frozen=True, tag=True):
    """A receiver refuses a version (digest, order, missing tensor); the sender sends the full set."""

    version: int
    cause: str


class Published(Tagged, frozen=True, tag=True):
    """Every receiver of a `Publish` applied the version."""

    version: int
    digest: str
    bytes: int
    seconds: float
    apply_seconds: dict[str, float]


# ---- scoring and training (arrays travel as buffers in the order of `arrays`)


class Score(Tagged, frozen=True, tag=True):
    """Log-probs (or values) of each sequence; arrays tokens [n, s] and lengths [n]; answered by `Scored`."""

    step: int
    what: str  # logprobs | values
    arrays: tuple[ArraySpec, ...]
    temperature: float = 1.0


class Scored(Tagged, frozen=True, tag=True):
    """Array scores [n, s], zero where a sequence has no token."""

    step: int
    arrays: tuple[ArraySpec, ...]
    seconds: float


class Train(Tagged, frozen=True, tag=True):
    """One optimiser step on one minibatch with the loss of this name and its hyper-parameters."""

    step: int
    loss: str  # policy | supervised | value
    hyper: dict[str, float | str]
    arrays: tuple[ArraySpec, ...]


class Save(Tagged, frozen=True, tag=True):
    """To a trainer: write a checkpoint after this step of the run, keep the newest `keep`; answered by `Saved`."""

    step: int
    version: int
    keep: int


class Saved(Tagged, frozen=True, tag=True):
    """The checkpoint is whole on the trainer's disk, at this place of its site's directory."""

    step: int
    directory: str
    seconds: float


class Trained(Tagged, frozen=True, tag=True):
    """What the step measured (loss, gradient norm, KL, clip fraction, ...)."""

    step: int
    metrics: dict[str, float]
    seconds: float


# ---- process groups across sites (`hetrl.runtime.wan`)


class WanPiece(Tagged, frozen=True, tag=True):
    """Piece `number` of what one rank sends in operation `sequence` of a group; the buffer holds its bytes.

    `tag` tells the streams of one operation apart; all pieces of a stream hold `size_bytes` of `dtype`.
    """

    group: str
    operation: str
    sequence: int
    tag: int
    number: int
    size_bytes: int
    dtype: str


class WanReady(Tagged, frozen=True, tag=True):
    """The receiver has begun the operation: whatever is left of the stream may come."""

    group: str
    operation: str
    sequence: int
    tag: int


class WanFailed(Tagged, frozen=True, tag=True):
    """A rank gave the group up; every other rank of it does the same, with this cause."""

    group: str
    cause: str


class WanProbe(Tagged, frozen=True, tag=True):
    """Are you there, and what does the group do at your place? Answered by `WanProbed`."""

    group: str


class WanProbed(Tagged, frozen=True, tag=True):
    """The operations under way at a rank, as in "all_reduce 7"."""

    operations: tuple[str, ...]


class StoreAsk(Tagged, frozen=True, tag=True):
    """To the owner of a store: do `operation` with these keys and values; answered by `StoreAnswer`."""

    operation: str  # set | get | wait | add | compare_set | delete | check | count
    keys: tuple[str, ...] = ()
    values: tuple[bytes, ...] = ()
    timeout_seconds: float = 0.0


class StoreAnswer(Tagged, frozen=True, tag=True):
    """What the operation returns: values of keys, or one number in digits; None when a key did not come in time."""

    values: tuple[bytes, ...] | None


# ---- run group


class Leave(Tagged, frozen=True, tag=True):
    """To the controller: the next epoch is without me; answered by `Done`."""

    epoch: int


class Arrive(Tagged, frozen=True, tag=True):
    """To the controller: I am at this barrier; answered by `Done` when every member of the epoch is, or `Failed`."""

    epoch: int
    barrier: str


class Share(Tagged, frozen=True, tag=True):
    """A value for every member of the epoch, under this name."""

    epoch: int
    name: str
    value: bytes


Message = (
    Join
    | Go
    | Heartbeat
    | Abort
    | Finish
    | Failed
    | Done
    | Undeliverable
    | Hello
    | Acknowledged
    | Probe
    | LinkRestored
    | LinkStats
    | LinkStatsReply
    | Echo
    | EchoReply
    | Measure
    | LinkMeasured
    | Ballast
    | Generate
    | Generated
    | Publish
    | WeightsBegin
    | WeightsTensor
    | WeightsEnd
    | WeightsApplied
    | WeightsRejected
    | Published
    | Score
    | Scored
    | Train
    | Trained
    | Save
    | Saved
    | WanPiece
    | WanReady
    | WanFailed
    | WanProbe
    | WanProbed
    | StoreAsk
    | StoreAnswer
    | Leave
    | Arrive
    | Share
)

# The channel of each type that is not control; messages of one channel arrive in the order in which they were sent.
_PRIORITIES: dict[type[Tagged], Priority] = {
    Ballast: Priority.DATA,
    Generate: Priority.DATA,
    Generated: Priority.DATA,
    Score: Priority.DATA,
    Scored: Priority.DATA,
    Train: Priority.DATA,
    Trained: Priority.DATA,
    WanPiece: Priority.DATA,
    WeightsBegin: Priority.WEIGHTS,
    WeightsTensor: Priority.WEIGHTS,
    WeightsEnd: Priority.WEIGHTS,
}

_encoder = msgspec.msgpack.Encoder()
_header_decoder = msgspec.msgpack.Decoder(Header)
_message_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def encode(header: Header, message: Message) -> list[bytes]:
    """Return the first two frames of a message."""
    return [_encoder.encode(header), _encoder.encode(message)]


def encode_header(header: Header) -> bytes:
    """Return the first frame of a chunk."""
    return _encoder.encode(header)


def encode_message(message: Message) -> bytes:
    """Return the struct of a message."""
    return _encoder.encode(message)


def decode_header(frame: bytes | memoryview) -> Header:
    """Read a header; raises msgspec.MsgspecError on anything else, a foreign format included."""
    header = _header_decoder.decode(frame)
    if header.format != WIRE_FORMAT:
        raise msgspec.ValidationError(f"wire format {header.format!r}, expected {WIRE_FORMAT!r}")
    return header


def decode_message(frame: bytes | memoryview) -> Message:
    """Read a message; raises msgspec.MsgspecError on anything that is not one of the schema."""
    return _message_decoder.decode(frame)


def priority_of(message: Message) -> Priority:
    """Return the channel that a message travels in."""
    return _PRIORITIES.get(type(message), Priority.CONTROL)


def address(site: str, role: str, instance: int = 0) -> str:
    """Return the address of a member."""
    return f"{site}/{role}/{instance}"


def site_of(member: str) -> str:
    """Return the site of a member's address."""
    return member.split("/", 1)[0]


def gateway_of(site: str) -> str:
    """Return the address of the gateway of a site."""
    return address(site, "gateway")


def by_site(receivers: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Group receivers by site, order kept."""
    groups: dict[str, tuple[str, ...]] = {}
    for receiver in receivers:
        groups[site_of(receiver)] = (*groups.get(site_of(receiver), ()), receiver)
    return groups
