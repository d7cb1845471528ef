"""One rank's place on the wide area: its `Member` in a thread of its own, and who gets what arrives there."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

from hetrl.errors import HetrlError
from hetrl.runtime import wire
from hetrl.runtime.transport.farewell import LONGEST_FAREWELL_SECONDS
from hetrl.runtime.transport.member import Envelope, Member
from hetrl.runtime.wan.streams import Arrivals, Inbox, Key, Outbox, kept_bytes, key_of

PROBE_SECONDS = 3.0
LAST_WORDS_SECONDS = 1.0  # for telling the other ranks why this one stops
_CLOSE_SECONDS = LONGEST_FAREWELL_SECONDS + 10.0
_UNHANDLED = 1000  # messages kept for handlers to come; the oldest go first

_T = TypeVar("_T")
_log = logging.getLogger(__name__)


class GroupError(HetrlError, RuntimeError):
    """An operation across sites failed: the message names rank, address, site, operation and sequence number.

    It is a RuntimeError as well, which is what torch's own backends raise.
    """


class KnownGroup(Protocol):
    """What an endpoint knows of a group (`hetrl.runtime.wan.communicator`)."""

    name: str
    addresses: Sequence[str]

    def fail(self, cause: str, tell: bool) -> None:
        """End every operation with this cause."""

    def under_way(self) -> tuple[str, ...]:
        """Return the operations under way."""


class Endpoint:
    """Sends and receives for the groups of one rank, on an asyncio loop in a thread.

    Methods are for the loop's thread, but for `submit`, `call`, `handle` and `close`, which are for every other one.
    """

    def __init__(self, member: Member, ranks: Sequence[str], watcher: str | None = None) -> None:
        """Connect a member; of the others, it hears the `ranks` of its world alone, and tells a `watcher` it lives."""
        self.member, self.address = member, member.address
        self._ranks, self._watcher = frozenset(ranks), watcher
        self.inbox, self.outbox = Inbox(), Outbox()
        self._handlers: dict[type[Any], Callable[[Envelope], None]] = {}
        self._unhandled: deque[Envelope] = deque(maxlen=_UNHANDLED)
        self._groups: dict[str, KnownGroup] = {}
        self._over: set[str] = set()
        self._gone: dict[str, str] = {}
        self._failed: dict[str, dict[str, str]] = {}  # groups that ranks gave up before this one knew them, and why
        self._sending: Counter[tuple[str, str]] = Counter()  # (group, receiver): pieces that wait to be taken
        self._end: str | None = None
        self.broken = False  # a group failed
        self._tasks: set[asyncio.Task[Any]] = set()
        self._loop = asyncio.new_event_loop()
        self._closing = asyncio.Event()
        self._up: Future[None] = Future()
        self._thread = threading.Thread(target=self._work, name=f"wan {self.address}", daemon=True)
        self._thread.start()
        self._up.result()

    def submit(self, work: Coroutine[Any, Any, _T]) -> Future[_T]:
        """Start a coroutine on the endpoint's loop; raises GroupError when the endpoint is closed."""
        if self._loop.is_closed():
            work.close()
            raise GroupError(f"{self.address}: the world is stopped; start it again")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def call(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Run a coroutine on the endpoint's loop and return its result."""
        return self.submit(work).result()

    def handle(self, kind: type[Any], handler: Callable[[Envelope], None]) -> None:
        """Give messages of a type that is not about groups to `handler`, those that came before included."""
        self._loop.call_soon_threadsafe(self._begin_to_handle, kind, handler)

    def close(self) -> None:
        """End every operation, the member and the thread; nothing happens the second time."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join(_CLOSE_SECONDS)

    async def add(self, group: KnownGroup) -> None:
        """Know a group, so that it hears of lost members."""
        self._groups[group.name] = group
        for address in set(group.addresses) & set(self._gone):
            group.fail(self._gone[address], tell=False)
        for source, cause in self._failed.pop(group.name, {}).items():
            if source in group.addresses:
                group.fail(cause, tell=False)
        if self._end is not None:
            group.fail(self._end, tell=False)

    def drop(self, group: str) -> None:
        """End the streams of a group; what still arrives for it is dropped."""
        self._over.add(group)
        self.inbox.forget(group)
        self.outbox.forget(group)
        self._sending = Counter({name: count for name, count in self._sending.items() if name[0] != group})

    def remove(self, group: KnownGroup) -> None:
        """Forget a group that is over."""
        self._groups.pop(group.name, None)

    async def send(
        self, to: Sequence[str], key: Key, number: int, total: tuple[int, str], piece: bytes | memoryview
    ) -> None:
        """Send one piece of a stream of `total` (bytes, dtype), once over each link; waits for room.

        A memoryview is not copied: it must not change any more.
        """
        size_bytes, dtype = total
        message = wire.WanPiece(
            group=key.group,
            operation=key.operation,
            sequence=key.sequence,
            tag=key.tag,
            number=number,
            size_bytes=size_bytes,
            dtype=dtype,
        )
        pending = [(key.group, receiver) for receiver in to]
        self._sending.update(pending)
        await self.outbox.admit(to, key, kept_bytes(memoryview(piece)))
        await self.member.send(to, message, [piece])
        self._sending.subtract(pending)  # not after a failure: `awaited` tells whom it waited for

    def awaited(self, group: str) -> set[str]:
        """Return the members that operations of a group wait for, to send something or to take it."""
        taking = {receiver for (name, receiver), count in self._sending.items() if name == group and count > 0}
        return self.inbox.awaited(group) | taking

    def begin(self, arrivals: Arrivals) -> None:
        """Receive a stream: what came early lands, and the source hears that the rest may come."""
        self.inbox.begin(arrivals)
        key = arrivals.key
        ready = wire.WanReady(group=key.group, operation=key.operation, sequence=key.sequence, tag=key.tag)
        self.post((arrivals.source,), ready)

    def post(self, to: Sequence[str], message: wire.Message, reply_to: int | None = None) -> None:
        """Send a small message without waiting for it."""
        self.spawn(self._post(to, message, reply_to))

    async def _post(self, to: Sequence[str], message: wire.Message, reply_to: int | None) -> None:
        try:
            await self.member.send(to, message, reply_to=reply_to)
        except HetrlError as error:
            _log.info("%s: %s not sent: %s", self.address, type(message).__name__, error)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run something beside the operations until it ends or the endpoint does."""
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def probe(self, address: str, group: str) -> tuple[str, ...] | None:
        """Return the operations of a group that are under way at a rank; None when it does not answer."""
        try:
            reply = await self.member.request(
                address, wire.WanProbe(group=group), timeout_seconds=PROBE_SECONDS, doing="is it there?"
            )
        except HetrlError:
            return None
        return reply.message.operations if isinstance(reply.message, wire.WanProbed) else None

    def _doing(self) -> str:
        """Return what this rank is in at present, as in "all_reduce 7 of group 1"."""
        named = (f"{title} of group {group.name}" for group in self._groups.values() for title in group.under_way())
        return ", ".join(named) or "no operation across sites"

    def lost(self, address: str, cause: str) -> None:
        """End the groups of a member that is gone."""
        self._gone[address] = cause
        for group in list(self._groups.values()):
            if address in group.addresses:
                group.fail(cause, tell=True)

    def _work(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._live())

    async def _live(self) -> None:
        """Hear what arrives until `close`."""
        try:
            async with self.member:
                if (watcher := self._watcher) is not None:
                    self.member.start_heartbeat(lambda: (watcher,), doing=self._doing)
                reading = self._loop.create_task(self._read())
                self._up.set_result(None)
                with self.member.links.told(self._link_changed):
                    await self._closing.wait()
                broken = self.broken
                self._stop(f"{self.address}: the world is stopped")
                if self._tasks:
                    await asyncio.wait(self._tasks, timeout=LAST_WORDS_SECONDS)
                for task in (reading, *self._tasks):
                    task.cancel()
                await asyncio.gather(reading, *self._tasks, return_exceptions=True)
                if broken:  # whoever is to hear its last words may be dead
                    self.member.finish(HetrlError(f"{self.address}: a group failed"))
        except BaseException as error:
            if self._up.done():
                raise
            self._up.set_exception(error)

    def _link_changed(self, site: str) -> None:
        """End the groups of the ranks of a site once its link is given up."""
        if cause := self.member.links.why_given_up(site):
            for address in sorted(self._ranks):
                if wire.site_of(address) == site:
                    self.lost(address, f"{address} cannot be reached: {cause}")

    async def _read(self) -> None:
        while True:
            try:
                self._take(await self.member.receive())
            except Exception as error:  # a defect included: nobody may wait in vain
                self._stop(str(error) if isinstance(error, HetrlError) else f"{self.address}: {error!r}")
                return

    def _stop(self, cause: str) -> None:
        """End the operations of every group."""
        self._end = cause
        for group in list(self._groups.values()):
            group.fail(cause, tell=False)

    def _take(self, envelope: Envelope) -> None:
        """Give a message to whom it concerns."""
        source = envelope.header.source
        if wire.role_of(source).endswith(wire.RANK) and source not in self._ranks:
            self.member.offended(source, f"{type(envelope.message).__name__} of a rank of another world")
            return
        match envelope.message:
            case wire.WanPiece() as piece if len(envelope.buffers) == 1:
                if piece.group not in self._over:
                    self._keep(source, piece, envelope.buffers[0])
            case wire.WanReady() as ready:
                if ready.group not in self._over:
                    self.outbox.ready(source, key_of(ready))
            case wire.WanProbe(group=name):
                group = self._groups.get(name)
                probed = wire.WanProbed(operations=group.under_way() if group else ())
                self.post((source,), probed, envelope.header.id)
            case wire.WanFailed(group=name, cause=cause):
                self._give_up(source, name, cause)
            case wire.Undeliverable(receiver=receiver, cause=cause):
                self.lost(receiver, f"{receiver} cannot be reached: {cause}")
            case wire.StoreAsk():
                self._dispatch(envelope)
            case _:  # nothing that a rank waits for
                pass

    def _keep(self, source: str, piece: wire.WanPiece, buffer: memoryview) -> None:
        try:
            self.inbox.take(source, piece, buffer)
        except ValueError as error:
            self.lost(source, str(error))

    def _give_up(self, source: str, name: str, cause: str) -> None:
        """Hear that a rank gave a group up, which counts where it is one of the group's own."""
        group = self._groups.get(name)
        if group is None and len(self._failed) < _UNHANDLED:
            self._failed.setdefault(name, {})[source] = cause
        elif group is not None and source in group.addresses:
            group.fail(cause, tell=False)

    def _dispatch(self, envelope: Envelope) -> None:
        """Give a message to the handler of its type, or keep it for one that is still to come."""
        handler = self._handlers.get(type(envelope.message), self._unhandled.append)
        handler(envelope)

    def _begin_to_handle(self, kind: type[Any], handler: Callable[[Envelope], None]) -> None:
        self._handlers[kind] = handler
        waiting, self._unhandled = self._unhandled, deque(maxlen=_UNHANDLED)
        for envelope in waiting:
            self._dispatch(envelope)
