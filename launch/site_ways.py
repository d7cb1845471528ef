"""How the gateways of a run reach each other: from the site files and the gateways' addresses to each site's links.

the way from A to B = ways[B] in A's file, else
    A leaves by ssh or relay: that
    A leaves directly: as B lets others in (direct, ssh, relay)
    A leaves by a proxy: through it to B's gateway, or to the relay where B lets others in by that
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from hetrl.describe.sites import SiteFile
from hetrl.errors import UsageError
from hetrl.files import read_private, write_private
from hetrl.plan.plan import Route
from hetrl.runtime.gateway.relay_protocol import key_of_run
from hetrl.runtime.gateway.ways import Kind, Offer, SiteLinks, Way

STREAMS = 4  # of the data between two sites, where the plan asks for no more
OFFERS_PER_PEER = 2  # each is replaced as soon as it is taken


def links_of(
    sites: Sequence[SiteFile], gateways: Mapping[str, str], routes: Iterable[Route] = ()
) -> dict[str, SiteLinks]:
    """Return the links of each site; `gateways` are the endpoints (tcp://host:port), `routes` those of the plan.

    Raises UsageError for two sites without a way, naming both and what would make one.
    """
    streams = {(route.source, route.target): route.streams for route in routes}
    ways = {
        (one.name, other.name): _way(one, other, gateways, max(STREAMS, streams.get((one.name, other.name), 0)))
        for one, other in itertools.permutations(sites, 2)
    }
    return {site.name: _links_of_one(site, ways) for site in sites}


def relay_secrets(sites: Iterable[SiteFile]) -> dict[str, str]:
    """Read the secret of every relay that the site files name.

    Raises HetrlError where one is missing or others can read it, UsageError where two files disagree.
    """
    secrets: dict[str, str] = {}
    for site in sites:
        if site.relay is None:
            continue
        secret = read_private(Path(site.relay_secret).expanduser(), f"secret of relay {site.relay}").strip()
        if secrets.setdefault(site.relay, secret) != secret:
            raise UsageError(
                f"{site.name}: {site.relay_secret} is not the secret that another site has for relay {site.relay}; "
                "name the same relay_secret in both files"
            )
    return secrets


def write_relay_keys(directory: Path, run: str, links: SiteLinks, secrets: Mapping[str, str]) -> dict[str, str]:
    """Write the keys of a run for the relays that a site uses; return what its gateway's file says of them."""
    if not links.relays:
        return {}
    keys = {relay: key_of_run(secrets[relay], run).hex() for relay in links.relays}
    write_private(directory / "relay_keys.json", json.dumps(keys), "file of relay keys")
    return {"relay_keys": "relay_keys.json"}


def _links_of_one(site: SiteFile, ways: Mapping[tuple[str, str], Way]) -> SiteLinks:
    """Return what a site dials, and where it waits for those who dial it over a relay."""
    dialled = Counter(way.relay for (_, target), way in ways.items() if target == site.name and way.relay)
    return SiteLinks(
        links={target: way for (source, target), way in ways.items() if source == site.name},
        offers=tuple(Offer(str(relay), OFFERS_PER_PEER * peers, _proxy(site)) for relay, peers in dialled.items()),
        proxy_credentials=site.proxy_credentials,
        ssh_config=site.ssh_config,
    )


def _way(one: SiteFile, other: SiteFile, gateways: Mapping[str, str], streams: int) -> Way:
    """Return the way from one site to another."""
    endpoint = gateways[other.name]
    match kind := _kind(one, other):
        case "ssh":
            if other.login is None:
                raise _no_way(one, other, f"{one.name} takes ssh, and the file of {other.name} has no login")
            return Way(kind, endpoint, streams, login=other.login)
        case "relay":
            return Way(kind, endpoint, streams, relay=_relay(one, other), proxy=_proxy(one))
        case "proxy":
            if one.proxy is None:
                raise UsageError(f"{one.name}: the way to {other.name} is proxy; set `proxy: host:port` in its file")
            return Way(kind, endpoint, streams, proxy=one.proxy)
        case "direct":
            return Way(kind, endpoint, streams)
    raise _no_way(one, other, f"{other.name} lets nobody in (ingress: closed)")


def _kind(one: SiteFile, other: SiteFile) -> Kind | None:
    """Return the kind of way from one site to another, None where the other is closed."""
    if other.name in one.ways:
        return one.ways[other.name]
    if one.egress in ("ssh", "relay"):
        return one.egress
    way_in = other.way_in
    if way_in == "direct":
        return one.egress
    return None if way_in == "closed" else way_in


def _relay(one: SiteFile, other: SiteFile) -> str:
    """Return the relay at which two sites meet."""
    relays = sorted({site.relay for site in (one, other) if site.relay is not None})
    if not relays:
        raise _no_way(one, other, "their way is a relay, and neither file names one")
    if len(relays) > 1:
        raise _no_way(one, other, f"{one.name} has relay {one.relay}, {other.name} has {other.relay}")
    return relays[0]


def _proxy(site: SiteFile) -> str | None:
    return site.proxy if site.egress == "proxy" else None


def _no_way(one: SiteFile, other: SiteFile, why: str) -> UsageError:
    return UsageError(
        f"there is no way from {one.name} to {other.name}: {why}; do one of these (docs/links.md):\n"
        "  run `hetrl relay` on a host that both can reach, and set the same `relay: host:port` in both files\n"
        f"  set `login: user@host` in the file of {other.name}, and `ways: {{{other.name}: ssh}}` in the other one\n"
        f"  open a gateway_port of {other.name} in its firewall, and set `ingress: direct` in its file"
    )
