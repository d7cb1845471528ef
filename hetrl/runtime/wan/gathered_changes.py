"""An all_gather that sends what changed since the last one into the same memory, losslessly.

sender      a rank keeps what it last sent of its own share, the *base*; each piece goes as the changes against it
            (`hetrl.runtime.wire.changes`) and the digest of its values, or as all its values: the first time, and
            where these are less
receiver    the output holds what the last gather left there, which is the same base; the leader of a site changes it
            in place, compares the digest, and passes all values on inside its site

A receiver keeps nothing and decides nothing. Whether the bases are equal is not agreed on beforehand, it is found out:
by the digest of the result, which a wrong base, damage and a defect of the codec all miss.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from blake3 import blake3

from hetrl.errors import HetrlError, UsageError
from hetrl.runtime.wan.coded import CodedArrivals, in_threads
from hetrl.runtime.wan.collectives import dtype_name, view_of
from hetrl.runtime.wan.communicator import Communicator
from hetrl.runtime.wan.streams import Arrivals, Key, cuts
from hetrl.runtime.wire import changes

_DIGEST_BYTES = 16


class GatheredChanges:
    """The way of one output tensor's shares (`hetrl.runtime.wan.collectives.Way`), with this rank's base."""

    def __init__(self, output: torch.Tensor) -> None:
        """Know no base: the first gather sends all values. Raises UsageError for a type that has no changes."""
        if output.element_size() not in (2, 4):
            raise UsageError(f"wan: changes of {output.dtype} are not gathered; its elements must have 2 or 4 bytes")
        self._word = np.dtype(f"<u{output.element_size()}")
        self._base: np.ndarray | None = None

    async def send(self, group: Communicator, key: Key, to: Sequence[str], tensor: torch.Tensor) -> None:
        """Send this rank's share."""
        place, known = view_of(tensor), self._base is not None
        if self._base is None:
            self._base = np.empty(place.nbytes, np.uint8)
        calls = (partial(self._piece, self._base[cut], place[cut], known) for cut in cuts(place.nbytes))
        number = 0
        async for piece in in_threads(calls):
            await group.endpoint.send(to, key, number, (place.nbytes, dtype_name(tensor)), piece)
            number += 1
        group.endpoint.outbox.end(to, key)

    def begin(self, group: Communicator, key: Key, source: int, tensor: torch.Tensor) -> Arrivals:
        """Begin to receive a rank's share into what the last gather left of it."""
        sizes = cuts(tensor.nbytes)
        arrivals = _ChangedShare(key, group.addresses[source], view_of(tensor), sizes, dtype_name(tensor), self._word)
        return group.begin(arrivals)

    def _piece(self, base: np.ndarray, values: memoryview, known: bool) -> bytes:
        """Return what turns the base into these values, in whichever form is shorter; they are the base then."""
        current = np.frombuffer(values, np.uint8)
        payload = changes.encode(base.view(self._word), current.view(self._word)) if known else None
        base[:] = current
        if payload is None or _DIGEST_BYTES + len(payload) >= len(values):
            return bytes(values)
        return _digest(values) + payload


class _ChangedShare(CodedArrivals):
    """A share at its receiver: pieces of all values and of changes."""

    def __init__(
        self, key: Key, source: str, place: memoryview, cuts: Sequence[slice], dtype: str, word: np.dtype
    ) -> None:
        super().__init__(key, source, place, cuts, dtype)
        self._word = word

    def _decode(self, payload: memoryview, place: memoryview) -> None:
        changes.apply(np.frombuffer(place, self._word), payload[_DIGEST_BYTES:])
        if _digest(place) != payload[:_DIGEST_BYTES]:
            raise HetrlError(
                f"{self.key}: the changes of {self.source} do not lead to its values from those held here; weights "
                "were written on some ranks only, or on all of them without a call of gather_changes"
            )


def _digest(values: memoryview) -> bytes:
    return blake3(values).digest(_DIGEST_BYTES)
