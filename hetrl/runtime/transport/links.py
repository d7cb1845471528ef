"""Which sites a member cannot reach at present, as the gateway of its own site says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager

from hetrl.runtime.wire import is_gateway, site_of


class Links:
    """The links that are out or given up, and who wants to know of changes."""

    def __init__(self) -> None:
        self._out: set[str] = set()
        self._given_up: dict[str, str] = {}
        self._listeners: dict[object, Callable[[str], None]] = {}  # as many as requests wait: found by a key

    def are_out(self, address: str) -> bool:
        """Whether what is sent to a member waits for a link."""
        return site_of(address) in self._out

    def why_given_up(self, address: str) -> str | None:
        """Return why nothing that is sent to a member will arrive; None where it does, or waits."""
        return self._given_up.get(site_of(address))

    def give_up(self, site: str, cause: str) -> None:
        """Note that the link to a site was out for longer than anybody waits."""
        self._given_up[site] = cause
        self._tell(site)

    def lost(self, site: str) -> None:
        """Note that the link to a site is out."""
        self._out.add(site)
        self._tell(site)

    def restored(self, site: str) -> None:
        """Note that the link to a site carries again, or lost a part of itself that is back."""
        self._out.discard(site)
        self._given_up.pop(site, None)
        self._tell(site)

    def forget(self) -> None:
        """Take no link for out, or given up, that the gateway does not call so from here on."""
        for site in {*self._out, *self._given_up}:
            self.restored(site)

    def _tell(self, site: str) -> None:
        for listener in [*self._listeners.values()]:
            listener(site)

    @contextmanager
    def told(self, listener: Callable[[str], None]) -> Iterator[None]:
        """Let `listener` hear of each change, by the site at the other end."""
        key = object()
        self._listeners[key] = listener
        try:
            yield
        finally:
            del self._listeners[key]

    @asynccontextmanager
    async def timeout(self, receivers: Iterable[str], seconds: float) -> AsyncIterator[None]:
        """Raise TimeoutError after so long, as asyncio.timeout does; the clock begins anew after a link to any was out.

        Whoever waits for an answer of a gateway itself asks how things are: there the clock goes on.
        """
        sites = {site_of(one) for one in receivers if not is_gateway(one)}
        loop = asyncio.get_running_loop()

        def look(site: str) -> None:
            out = not self._out.isdisjoint(sites)
            if site in sites and (out or deadline.when() is None):  # a stream that is back lets no clock begin anew
                deadline.reschedule(None if out else loop.time() + seconds)

        async with asyncio.timeout(seconds if self._out.isdisjoint(sites) else None) as deadline:
            with self.told(look):
                yield
