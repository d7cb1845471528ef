"""Everything that crosses between the members of a run: one schema.

A message is a sequence of frames: a `Header`, one of the `Message` structs (both msgpack, by msgspec) and any
number of raw buffers (tensor bytes) that the message describes. Nothing is unpickled.

Members have addresses `site/role/instance`: `alpha/controller/0`, `alpha/actor_training/0` (rank 0 of the world of that
role), `beta/actor_generation/2` (the replica's number in the plan). A header may name several receivers: every site
among them gets the message once and its gateway hands it to each receiver there.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

WIRE_FORMAT = "hetrl-wire/1"


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """Who speaks to whom; `reply_to` carries the `id` of the request that is answered."""

    run: str
    source: str
    to: tuple[str, ...]
    id: int
    reply_to: int | None = None
    format: str = WIRE_FORMAT


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
    """The run starts with these members; `epoch` counts changes of membership."""

    epoch: int
    members: tuple[str, ...]


class Heartbeat(Tagged, frozen=True, tag=True):
    """A member lives."""


class Received(Tagged, frozen=True, tag=True):
    """The receiver took the buffers of the message `reply_to`: the sender's window opens."""


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
    """A gateway could not hand a message over; `receiver` is unknown or not connected."""

    receiver: str
    cause: str


# ---- links


class LinkCounters(msgspec.Struct, frozen=True, kw_only=True):
    """What a gateway sent to and received from another site: messages, and the bytes of their frames."""

    messages_sent: int = 0
    bytes_sent: int = 0
    messages_received: int = 0
    bytes_received: int = 0


class LinkStats(Tagged, frozen=True, tag=True):
    """To a gateway (`site/gateway/0`): what crossed your links so far? Answered by `LinkStatsReply`."""


class LinkStatsReply(Tagged, frozen=True, tag=True):
    """Counters per other site; connections refused for their key, and malformed messages dropped, since the start."""

    links: dict[str, LinkCounters]
    refused: int
    malformed: int


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


Message = (
    Join
    | Go
    | Heartbeat
    | Received
    | Abort
    | Finish
    | Failed
    | Done
    | Undeliverable
    | LinkStats
    | LinkStatsReply
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
)

_encoder = msgspec.msgpack.Encoder()
_header_decoder = msgspec.msgpack.Decoder(Header)
_message_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def encode(header: Header, message: Message) -> list[bytes]:
    """Return the first two frames of a message."""
    return [_encoder.encode(header), _encoder.encode(message)]


def decode_header(frame: bytes | memoryview) -> Header:
    """Read a header; raises msgspec.MsgspecError on anything else, a foreign format included."""
    header = _header_decoder.decode(frame)
    if header.format != WIRE_FORMAT:
        raise msgspec.ValidationError(f"wire format {header.format!r}, expected {WIRE_FORMAT!r}")
    return header


def decode_message(frame: bytes | memoryview) -> Message:
    """Read a message; raises msgspec.MsgspecError on anything that is not one of the schema."""
    return _message_decoder.decode(frame)


def address(site: str, role: str, instance: int = 0) -> str:
    """Return the address of a member."""
    return f"{site}/{role}/{instance}"


def site_of(member: str) -> str:
    """Return the site of a member's address."""
    return member.split("/", 1)[0]


def by_site(receivers: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Group receivers by site, order kept."""
    groups: dict[str, tuple[str, ...]] = {}
    for receiver in receivers:
        groups[site_of(receiver)] = (*groups.get(site_of(receiver), ()), receiver)
    return groups
