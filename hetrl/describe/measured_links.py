"""What lies between the sites: `topology/measured/links-DATE.json`, format `hetrl-links/1`, written by `hetrl probe`.

A file is dated and never edited. It has every raw sample, each direction of a link for itself, and a line for each
thing that could not be measured.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

from pydantic import AwareDatetime, ConfigDict, Field

from hetrl.files import replace_json

FORMAT = "hetrl-links/1"
_NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Samples = Annotated[tuple[_NotNegative, ...], Field(min_length=1)]


@dataclass(frozen=True)
class Throughput:
    """What arrived over so many streams, in each interval of `interval_seconds`."""

    streams: Annotated[int, Field(ge=1)]
    interval_seconds: _Positive
    interval_gbps: _Samples

    @property
    def gbps(self) -> float:
        """Return the mean: what arrived over the time."""
        return statistics.fmean(self.interval_gbps)


@dataclass(frozen=True)
class Probed:
    """One direction: every round trip of a small message, and the throughput of one or more numbers of streams."""

    source: str
    target: str
    way: str  # direct | ssh | relay | proxy between sites; mpi | sockets between the nodes of one
    round_trip_ms: Annotated[tuple[_Positive, ...], Field(min_length=1)]
    throughput: Annotated[tuple[Throughput, ...], Field(min_length=1)]

    @property
    def delay_ms(self) -> float:
        """Return half of the median round trip."""
        return statistics.median(self.round_trip_ms) / 2

    @property
    def best(self) -> Throughput:
        """Return the fastest throughput, of equal ones that with the fewest streams."""
        return max(self.throughput, key=lambda one: (one.gbps, -one.streams))


@dataclass(frozen=True)
class Unprobed:
    """What was not measured, and why."""

    what: str  # `alpha -> beta`, a site, `nodes of alpha`
    why: str


@dataclass(frozen=True)
class MeasuredLinks:
    """One file: both directions of each link between sites, and two nodes of each site where it has two."""

    measured_at: AwareDatetime
    command: str
    links: tuple[Probed, ...]
    nodes: tuple[Probed, ...] = ()
    skipped: tuple[Unprobed, ...] = ()

    __pydantic_config__ = ConfigDict(extra="forbid")

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object of the file."""
        return {"format": FORMAT, **asdict(self), "measured_at": self.measured_at.isoformat(timespec="seconds")}


def percentile(samples: Sequence[float], percent: float) -> float:
    """Return the sample below which so many percent of all lie, interpolated between neighbours."""
    ordered = sorted(samples)
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def write_measured_links(path: Path, measured: MeasuredLinks) -> None:
    """Write one file in one go; raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_json(path, measured.to_json())


def file_name(measured_at: datetime) -> str:
    """Return `links-DATE.json`, with the time of day: links differ by the hour."""
    return f"links-{measured_at:%Y-%m-%d-%H%M}.json"


def delay_and_gbps(files: Iterable[MeasuredLinks]) -> Mapping[frozenset[str], tuple[float, float]]:
    """Return {pair of sites: (delay_ms one way, gbps in one direction)}: of each direction its latest measurement.

    The planner's links are the same both ways, so the worse direction speaks for both.
    """
    latest: dict[tuple[str, str], Probed] = {}
    for one in sorted(files, key=lambda file: file.measured_at):
        latest |= {(link.source, link.target): link for link in one.links}
    found: dict[frozenset[str], tuple[float, float]] = {}
    for ends, link in latest.items():
        delay_ms, gbps = found.get(frozenset(ends), (0.0, float("inf")))
        found[frozenset(ends)] = (max(delay_ms, link.delay_ms), min(gbps, link.best.gbps))
    return found
