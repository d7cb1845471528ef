"""The store of a world on several sites: its owner, one rank, holds the keys; the other ranks ask through the gateways.

It is what `torch.distributed.TCPStore` is on one site. Values cross as messages, never as pickles.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import timedelta

from torch._C._distributed_c10d import Store

from hetrl.errors import HetrlError
from hetrl.runtime import wire
from hetrl.runtime.transport.member import Envelope
from hetrl.runtime.wan.endpoint import Endpoint

_ANSWER_SECONDS = 3.0  # what a question may take beyond the time that its owner waits


class StoreError(HetrlError, RuntimeError):
    """A key did not come in time, or the owner did not answer; a RuntimeError as well, as with torch's stores."""


class Table:
    """What a store holds; `apply` does one operation, None says that a key is still missing."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}

    def apply(self, ask: wire.StoreAsk) -> tuple[bytes, ...] | None:
        """Do an operation; raises HetrlError on one that there is not."""
        match ask:
            case wire.StoreAsk(operation="set", keys=(key,), values=(value,)):
                self._values[key] = value
                return ()
            case wire.StoreAsk(operation="get", keys=keys):
                missing = any(key not in self._values for key in keys)
                return None if missing else tuple(self._values[key] for key in keys)
            case wire.StoreAsk(operation="wait", keys=keys):
                return None if any(key not in self._values for key in keys) else ()
            case wire.StoreAsk(operation="check", keys=keys):
                return _number(all(key in self._values for key in keys))
            case wire.StoreAsk(operation="add", keys=(key,), values=(amount,)):
                self._values[key] = _number(int(self._values.get(key, b"0")) + int(amount))[0]
                return (self._values[key],)
            case wire.StoreAsk(operation="compare_set", keys=(key,), values=(expected, desired)):
                return (self._compare_set(key, expected, desired),)
            case wire.StoreAsk(operation="delete", keys=(key,)):
                return _number(self._values.pop(key, None) is not None)
            case wire.StoreAsk(operation="count"):
                return _number(len(self._values))
        raise HetrlError(f"a store does not do {ask.operation} with {len(ask.keys)} keys, {len(ask.values)} values")

    def _compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Set a key that holds `expected`, or one that is missing when that is empty, as TCPStore does."""
        held = self._values.get(key, b"")
        if held == expected:
            self._values[key] = desired
        return self._values.get(key, expected)


def _number(value: int) -> tuple[bytes]:
    return (str(int(value)).encode(),)


class StoreOwner:
    """Answers what the ranks ask a store, those that wait for a key when it comes."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._table = Table()
        self._changed = asyncio.Event()
        endpoint.handle(wire.StoreAsk, lambda envelope: endpoint.spawn(self._reply(envelope)))

    async def answer(self, ask: wire.StoreAsk) -> tuple[bytes, ...] | None:
        """Do an operation; None when a key did not come within the question's time."""
        try:
            async with asyncio.timeout(ask.timeout_seconds or None):
                while (values := self._table.apply(ask)) is None:
                    await self._changed.wait()
        except TimeoutError:
            return None
        if ask.operation in ("set", "add", "compare_set"):
            self._changed.set()
            self._changed = asyncio.Event()
        return values

    async def _reply(self, envelope: Envelope) -> None:
        assert isinstance(envelope.message, wire.StoreAsk)
        try:
            values = await self.answer(envelope.message)
        except (HetrlError, ValueError) as error:
            await self._endpoint.member.reply(envelope, wire.Failed(cause=str(error)))
            return
        await self._endpoint.member.reply(envelope, wire.StoreAnswer(values=values))


class GatewayStore(Store):
    """A store of torch.distributed whose keys the member `owner` holds; the owner itself passes its own address.

    Keep a reference for as long as the world lives: torch holds only the C++ half. `timeout_seconds` bounds every wait
    that names no time. Raises StoreError, which names the keys, who waits and the owner.
    """

    def __init__(self, endpoint: Endpoint, owner: str, timeout_seconds: float) -> None:
        super().__init__()
        self.endpoint = endpoint
        self._owner, self._seconds = owner, timeout_seconds
        self._held = StoreOwner(endpoint) if owner == endpoint.address else None

    def set(self, key: str, value: str | bytes) -> None:
        """Write a key."""
        self._ask("set", (key,), (_bytes(value),))

    def get(self, key: str) -> bytes:
        """Read a key, waiting until it is there."""
        return self._ask("get", (key,))[0]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Read keys, waiting until all are there."""
        return list(self._ask("get", keys))

    def add(self, key: str, amount: int) -> int:
        """Add to a number, which starts at 0, and return it."""
        return int(self._ask("add", (key,), _number(amount))[0])

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Write a key that holds `expected` (empty: or is missing); return what it holds then."""
        return self._ask("compare_set", (key,), (_bytes(expected), _bytes(desired)))[0]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are there."""
        self._ask("wait", keys, seconds=timeout.total_seconds() if timeout else None)

    def check(self, keys: list[str]) -> bool:
        """Tell whether all keys are there."""
        return self._ask("check", keys) == (b"1",)

    def delete_key(self, key: str) -> bool:
        """Remove a key; False when there was none."""
        return self._ask("delete", (key,)) == (b"1",)

    def num_keys(self) -> int:
        """Return how many keys there are."""
        return int(self._ask("count", ())[0])

    # Under these names torch's C++ side calls them.
    deleteKey, getNumKeys = delete_key, num_keys  # noqa: N815

    def set_timeout(self, timeout: timedelta) -> None:
        """Bound every later wait that names no time."""
        self._seconds = timeout.total_seconds()

    def _ask(
        self, operation: str, keys: Sequence[str], values: tuple[bytes, ...] = (), seconds: float | None = None
    ) -> tuple[bytes, ...]:
        limit = self._seconds if seconds is None else seconds
        ask = wire.StoreAsk(operation=operation, keys=tuple(keys), values=values, timeout_seconds=limit)
        return self.endpoint.call(self._answer(ask))

    async def _answer(self, ask: wire.StoreAsk) -> tuple[bytes, ...]:
        keys, me = ", ".join(ask.keys), f"{wire.site_of(self.endpoint.address)}: {self.endpoint.address}"
        if self._held is not None:
            values = await self._held.answer(ask)
        else:
            values = await self._request(ask, f"store: {ask.operation} {keys}")
        if values is None:
            raise StoreError(
                f"{me} waited {ask.timeout_seconds:g} s for {keys} in the store of {self._owner}; "
                "look into the logs of the other ranks"
            )
        return values

    async def _request(self, ask: wire.StoreAsk, doing: str) -> tuple[bytes, ...] | None:
        limit = ask.timeout_seconds + _ANSWER_SECONDS
        try:
            reply = await self.endpoint.member.request(self._owner, ask, timeout_seconds=limit, doing=doing)
        except HetrlError as error:
            raise StoreError(str(error)) from error
        assert isinstance(reply.message, wire.StoreAnswer)
        return reply.message.values


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value
