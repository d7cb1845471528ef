"""Measure the links of this site, with probes at the other sites: `python -m hetrl.runtime.instruments.probe`.

    say where the gateway listens (ready); wait for go.json: which sites are there
    for each number of streams, with a gateway of its own (gateway-<streams>.json):
        the first site:   for each pair of sites, one after the other, have the first measure the way to the second
        every site:       answer ballast; measure when asked; end when the first site says so

Links are measured through what a run uses: gateways, ways, CURVE, members. The first site writes links.json as it goes,
so that what is measured is kept whatever happens next.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec

from hetrl.describe.measured_links import Probed, Throughput, Unprobed
from hetrl.errors import GangTimeoutError, HetrlError, UsageError
from hetrl.files import replace_json, replace_text
from hetrl.runtime import wire
from hetrl.runtime.gateway.gateway_process import read_gateway, serving
from hetrl.runtime.instruments.load import full_load, gbps_of, round_trips
from hetrl.runtime.run.context import exit_with, log_to_stderr
from hetrl.runtime.transport.member import Envelope, Member
from hetrl.runtime.transport.rendezvous import GATEWAY_ENDPOINT, read_endpoint
from hetrl.runtime.wire.keys import read_keys

PROBE_FILE, READY_FILE, GO_FILE, LINKS_FILE = "probe.json", "ready", "go.json", "links.json"
MEET_SECONDS = 60.0  # for tunnels and relays to come up, once every site's task runs
SPARE_SECONDS = 60.0  # for the load's ramp on a slow link, beside the seconds that it lasts
POLL_SECONDS = 0.2

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ProbeFile:
    """What `probe.json` says: who this is, and what is measured. `ways` are the kinds of way from site to site.

    `bind` is the gateway's endpoint; None: the gateway finds one and writes it to gateway.endpoint.
    """

    run: str
    site: str
    bind: str | None
    streams: tuple[int, ...]
    seconds: float
    round_trips: int
    wait_seconds: float
    ways: Mapping[str, Mapping[str, str]]


@dataclass(frozen=True)
class Links:
    """What `links.json` says, so far or in the end."""

    links: tuple[Probed, ...] = ()
    skipped: tuple[Unprobed, ...] = ()
    done: bool = False


def gateway_file(streams: int) -> str:
    """Return the name of the file with the gateway that has so many streams to each peer."""
    return f"gateway-{streams}.json"


def most_seconds(rounds: int, seconds: float, sites: int) -> float:
    """Return how long a probe may take with so many rounds, sites, and seconds for each direction of each pair."""
    return rounds * (MEET_SECONDS + sites * (sites - 1) * (seconds + SPARE_SECONDS))


async def probe(directory: Path) -> None:
    """Take part in a probe; raises GangTimeoutError where nobody says that it begins."""
    asked = msgspec.json.decode((directory / PROBE_FILE).read_bytes(), type=ProbeFile)
    gateway, ways = read_gateway(directory / gateway_file(asked.streams[0]))
    endpoint = asked.bind or str(read_endpoint(directory / GATEWAY_ENDPOINT))
    replace_text(directory / READY_FILE, f"{endpoint}\n")
    sites = await wait_for_go(directory / GO_FILE, asked.wait_seconds)
    keys, leads = read_keys(directory / "keys.json"), asked.site == sites[0]
    found = Found(directory / LINKS_FILE, asked)
    for number, streams in enumerate(asked.streams):
        if number > 0:
            gateway, ways = read_gateway(directory / gateway_file(streams))
        member = Member(wire.address(asked.site, wire.PROBE, number), asked.run, endpoint, keys, directory)
        async with serving(gateway, ways), member:
            answering = asyncio.create_task(answer(member, most_seconds(len(asked.streams), asked.seconds, len(sites))))
            if leads:
                try:
                    await lead(member, sites, asked, number, found)
                finally:
                    answering.cancel()
            await asyncio.gather(answering, return_exceptions=leads)
    if leads:
        found.write(done=True)


async def wait_for_go(path: Path, timeout_seconds: float) -> tuple[str, ...]:
    """Return the sites that take part, the one that leads first, as soon as the launcher has written them."""
    deadline = time.monotonic() + timeout_seconds
    while not path.exists():
        if time.monotonic() > deadline:
            raise GangTimeoutError(
                f"waited {timeout_seconds:g} s for {path.name}: the launcher ended, or the other sites did not start"
            )
        next(path.parent.iterdir(), None)  # makes NFS look again
        await asyncio.sleep(POLL_SECONDS)
    return tuple(json.loads(path.read_text()))


# ---- every site


async def answer(member: Member, timeout_seconds: float) -> None:
    """Answer ballast, and measure when asked, until the first site says that the round is over."""
    async with asyncio.TaskGroup() as work:
        while True:
            envelope = await member.receive(timeout_seconds)
            match envelope.message:
                case wire.Finish():
                    return
                case wire.Ballast():
                    await member.reply(envelope, wire.Done())
                case wire.Measure() as asked:
                    work.create_task(_measure_and_reply(member, envelope, asked))


async def _measure_and_reply(member: Member, envelope: Envelope, asked: wire.Measure) -> None:
    try:
        measured: wire.Message = await measure(member, asked)
    except HetrlError as error:
        measured = wire.Failed(cause=str(error), exit_code=error.exit_code)
    await member.reply(envelope, measured)


async def measure(member: Member, asked: wire.Measure) -> wire.LinkMeasured:
    """Measure the way from this member to another; raises HetrlError where that one cannot be reached."""
    trips = await round_trips(lambda: _ask(member, asked.target, ()), asked.round_trips)
    load = await full_load(lambda payload: _ask(member, asked.target, (payload,)), asked.seconds, trips)
    return wire.LinkMeasured(
        round_trip_seconds=trips, interval_seconds=load.interval_seconds, interval_bytes=load.interval_bytes
    )


async def _ask(member: Member, target: str, buffers: Sequence[bytes]) -> None:
    await member.request(target, wire.Ballast(), buffers, timeout_seconds=SPARE_SECONDS, doing="probe the link")


# ---- the first site


class Found:
    """What the first site knows of all links, on disk after every pair."""

    def __init__(self, path: Path, asked: ProbeFile) -> None:
        """Nothing is known yet."""
        self._path, self._ways = path, asked.ways
        self._measured: dict[tuple[str, str], Probed] = {}
        self._skipped: dict[str, str] = {}

    def add(self, pair: tuple[str, str], streams: int, measured: wire.LinkMeasured) -> None:
        """Take what was measured with so many streams."""
        seconds = measured.interval_seconds
        throughput: tuple[Throughput, ...] = (Throughput(streams, seconds, gbps_of(measured.interval_bytes, seconds)),)
        trips = tuple(1e3 * seconds for seconds in measured.round_trip_seconds)
        if known := self._measured.get(pair):
            trips, throughput = known.round_trip_ms + trips, known.throughput + throughput
        self._measured[pair] = Probed(*pair, self._ways[pair[0]][pair[1]], trips, throughput)
        self.write()

    def skip(self, what: str, why: str) -> None:
        """Take what could not be measured; the first reason stays."""
        _log.warning("%s: %s", what, why)
        self._skipped.setdefault(what, why)
        self.write()

    def write(self, *, done: bool = False) -> None:
        """Replace the file."""
        skipped = tuple(Unprobed(what, why) for what, why in self._skipped.items())
        replace_json(self._path, asdict(Links(tuple(self._measured.values()), skipped, done)))


async def lead(member: Member, sites: Sequence[str], asked: ProbeFile, number: int, found: Found) -> None:
    """Have every pair of sites measured, one at a time; a site or pair that fails is noted, and the rest goes on."""
    probes = {site: wire.address(site, wire.PROBE, number) for site in sites}
    met = await asyncio.gather(*(_meet(member, site, probes[site], found) for site in sites))
    there = [site for site, is_there in zip(sites, met, strict=True) if is_there]
    for source, target in itertools.permutations(there, 2):
        wanted = wire.Measure(target=probes[target], round_trips=asked.round_trips, seconds=asked.seconds)
        try:
            measured = await _measured(member, probes[source], wanted)
        except HetrlError as error:
            found.skip(f"{source} -> {target}", str(error))
            continue
        found.add((source, target), asked.streams[number], measured)
        _log.info("%s -> %s over %d streams is measured", source, target, asked.streams[number])
    if others := [probes[site] for site in there if site != asked.site]:
        await member.send(others, wire.Finish())


async def _meet(member: Member, site: str, probe: str, found: Found) -> bool:
    """Return whether a site's probe answers."""
    if probe == member.address:
        return True
    try:
        await member.request(probe, wire.Ballast(), timeout_seconds=MEET_SECONDS, doing="meet the other sites")
    except HetrlError as error:
        found.skip(site, str(error))
        return False
    return True


async def _measured(member: Member, source: str, wanted: wire.Measure) -> wire.LinkMeasured:
    """Return what one probe measures of the way to another."""
    if source == member.address:
        return await measure(member, wanted)
    seconds = wanted.seconds + SPARE_SECONDS
    reply = await member.request(source, wanted, timeout_seconds=seconds, doing=f"measure the way to {wanted.target}")
    if not isinstance(reply.message, wire.LinkMeasured):
        raise HetrlError(f"{source} answered {type(reply.message).__name__}; its log says more")
    return reply.message


def main() -> int:
    """Take part in the probe that the files of this directory describe; returns the exit code."""
    log_to_stderr()
    try:
        asyncio.run(probe(Path.cwd()))
    except HetrlError as error:
        return exit_with(error)
    except OSError as error:
        return exit_with(UsageError(f"{error.filename}: {error.strerror}; `hetrl probe` writes the files of a probe"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
