"""Messages about weight versions: what is to be sent, what travels, what came of it."""

from __future__ import annotations

import msgspec

from hetrl.runtime.wire.header import Tagged


class TensorSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One tensor under its Hugging Face name, `bytes` long."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int


class Publish(Tagged, frozen=True, tag=True):
    """To a trainer: send the current weights as `version` to these members; a version that it keeps is sent again.

    Answered by `Exported` as soon as the trainer may go on; what came of it answers `FinishPublish`. Receivers whose
    link is out are left out as long as `quorum` others are not, and those that take longer than `patience_seconds` once
    so many others have the version; None: nobody is. With `encoding` delta, those that are known to have the version
    before get what changed since. A version that `gives_way` travels behind other weights.
    """

    version: int
    receivers: tuple[str, ...]
    quorum: int | None = None
    patience_seconds: float | None = None
    encoding: str = "full"  # full | delta
    gives_way: bool = False


class Exported(Tagged, frozen=True, tag=True):
    """The weights of the version are copied from the devices; they are sent beside whatever the trainer does next."""

    version: int


class FinishPublish(Tagged, frozen=True, tag=True):
    """To a trainer: say what came of the `Publish` of this version once all receivers have it or are given up."""

    version: int


class CatchUp(Tagged, frozen=True, tag=True):
    """To a trainer: bring these members, which are behind, to the newest version, this one at least.

    At their own pace, beside the versions that are published meanwhile. Answered by `Published`, of the version that
    they have then. What they get travels in the channel of other versions, behind other weights if these `gives_way`.
    """

    version: int
    receivers: tuple[str, ...]
    gives_way: bool = False


class WeightsBegin(Tagged, frozen=True, tag=True):
    """A version starts to arrive: a full set, or a delta, whose base is the version of this number and digest."""

    version: int
    encoding: str = "full"  # full | delta
    base_version: int | None = None
    base_digest: str | None = None
    gives_way: bool = False


class WeightsTensor(Tagged, frozen=True, tag=True):
    """A piece of one tensor: `bytes` of it from `offset`, whose `digest` (BLAKE3, 16 bytes in hex) is this.

    The buffer holds them as they are or, with `changes`, as what changed in those of the base (`wire.changes`).
    """

    version: int
    tensor: TensorSpec
    offset: int
    bytes: int
    digest: str
    changes: bool = False
    gives_way: bool = False


class WeightsEnd(Tagged, frozen=True, tag=True):
    """All pieces of the version are sent: so many tensors and bytes, and the digest over those of all pieces.

    Without `load` it is kept and not loaded, since a newer one follows at once.
    """

    version: int
    tensors: int
    bytes: int
    digest: str
    gives_way: bool = False
    load: bool = True


class WeightsApplied(Tagged, frozen=True, tag=True):
    """A receiver serves this version from now on, or when it wakes, or keeps it where that was all that was asked.

    `digest` is what it computed from what arrived. Of those that share a node's files one takes what comes, the others
    follow it.
    """

    version: int
    digest: str
    seconds: float
    node: str = ""  # what names the files that it shares
    follows: bool = False


class WeightsRejected(Tagged, frozen=True, tag=True):
    """A receiver refuses a version (base, digest, order, missing tensor); it keeps and serves what it has."""

    version: int
    cause: str


class Published(Tagged, frozen=True, tag=True):
    """Every receiver applied the version, but those that `failed` or were `left_out`, both with the cause.

    `bytes` are those of the full set. Where a delta was sent, it had `delta_bytes` for each receiver, and `changed` is
    the share of words that differ. Those that refused what they got, got the full set once more: `repaired` has why.
    """

    version: int
    digest: str
    bytes: int
    seconds: float
    apply_seconds: dict[str, float]
    failed: dict[str, str] = msgspec.field(default_factory=dict)
    left_out: dict[str, str] = msgspec.field(default_factory=dict)
    delta_bytes: int | None = None
    changed: float | None = None
    repaired: dict[str, str] = msgspec.field(default_factory=dict)


# What a version consists of on its way, all of it in one channel: behind other weights if it `gives_way`.
TravellingWeights = WeightsBegin | WeightsTensor | WeightsEnd

WeightMessage = (
    Publish | Exported | FinishPublish | CatchUp | TravellingWeights | WeightsApplied | WeightsRejected | Published
)
