"""What crossed the links in each step and what was refused, as the gateways count it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

import msgspec

from hetrl.errors import HetrlError
from hetrl.runtime import wire
from hetrl.runtime.transport.member import Member, RunAborted
from hetrl.text import printable

ASK_SECONDS = 5.0
OTHERS_EVERY_STEPS = 10  # the gateways of other sites are a round trip away
MOST_OFFENDERS = 64  # of one site's word

_log = logging.getLogger(__name__)


class LinkMeter:
    """Asks the gateways of `sites`, the lead site first, and remembers what they said last."""

    def __init__(self, member: Member, sites: Sequence[str]) -> None:
        self._member, self._sites = member, sites
        self._known: dict[str, wire.LinkCounters] = {}
        self.offences: dict[str, dict[str, int]] = {}  # messages refused at each site, by who sent them

    async def read(self, step: int) -> dict[str, Any]:
        """Return the row entries `links`, per link since it was read last, and `bytes_per_link`, since its start.

        The lead site's gateway is read in every step, the others in every tenth. One that does not answer in time is
        left out: no step fails for want of a metric. Raises RunAborted.
        """
        asked = self._sites if step % OTHERS_EVERY_STEPS == 0 else self._sites[:1]
        links: dict[str, dict[str, float | None]] = {}
        for site, stats in zip(asked, await asyncio.gather(*map(self._ask, asked)), strict=True):
            if stats is None:
                continue
            counters = stats.links
            if stats.offences:
                named = sorted(stats.offences.items(), key=lambda pair: -pair[1])[:MOST_OFFENDERS]
                self.offences[site] = {printable(peer): count for peer, count in named}
            # Each link has two ends; the site that is named first tells of it.
            for peer in self._sites[self._sites.index(site) + 1 :]:
                if peer in counters:
                    name = f"{site}-{peer}"
                    links[name] = since(self._known.get(name), counters[peer])
                    self._known[name] = counters[peer]
        total = {name: known.bytes_sent + known.bytes_received for name, known in self._known.items()}
        return {"links": links, "bytes_per_link": total}

    async def _ask(self, site: str) -> wire.LinkStatsReply | None:
        try:
            return await link_stats(self._member, site, ASK_SECONDS)
        except RunAborted:
            raise
        except HetrlError as error:
            _log.warning("%s", error)
            return None


async def link_stats(member: Member, site: str, timeout_seconds: float) -> wire.LinkStatsReply:
    """Return what crossed the links of a site so far; raises HetrlError where its gateway does not answer."""
    reply = await member.request(
        wire.gateway_of(site), wire.LinkStats(), timeout_seconds=timeout_seconds, doing="read the link counters"
    )
    assert isinstance(reply.message, wire.LinkStatsReply)
    return reply.message


def since(before: wire.LinkCounters | None, now: wire.LinkCounters) -> dict[str, float | None]:
    """Return what the counters grew by, and what is no count as it is; a gateway that started again counts from 0."""
    values, old = (msgspec.structs.asdict(counters) for counters in (now, before or wire.LinkCounters()))
    round_trip_seconds, peak_queued_bytes = values.pop("round_trip_seconds"), values.pop("peak_queued_bytes")
    started_again = any(values[name] < old[name] for name in values)
    grown = {name: round(value - (0 if started_again else old[name]), 6) for name, value in values.items()}
    round_trip_seconds = None if round_trip_seconds is None else round(round_trip_seconds, 6)
    return {**grown, "peak_queued_bytes": peak_queued_bytes, "round_trip_seconds": round_trip_seconds}
