"""What process groups across sites say (`hetrl.runtime.wan.world`)."""

from __future__ import annotations

from hetrl.runtime.wire.header import Tagged

# ---- process groups across sites (`hetrl.runtime.wan.world`)


class WanPiece(Tagged, frozen=True, tag=True):
    """Piece `number` of what one rank sends in operation `sequence` of a group; the buffer holds its bytes.

    `tag` tells the streams of one operation apart; all pieces of a stream hold `size_bytes` of `dtype`. A shorter
    buffer stands for them: sums of bfloat16 as `hetrl.runtime.wire.planes`, a share that changed as the digest of its
    values (16 bytes, BLAKE2b) and `hetrl.runtime.wire.changes`.
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


GroupMessage = WanPiece | WanReady | WanFailed | WanProbe | WanProbed | StoreAsk | StoreAnswer
