"""`hetrl probe` and `hetrl profile`: measure the links between the sites of an experiment, and the GPUs that they have.

probe      what lies between the sites, on the way that its runs take
profile    this machine, or by jobs a node of each GPU type of a site
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.text import Text

from hetrl.cost.efficiency import calibrated
from hetrl.describe.measured import Measured, file_name as machine_file_name, write_measured
from hetrl.describe.measured_links import MeasuredLinks, Probed, Unprobed, file_name, percentile, write_measured_links
from hetrl.describe.sites import ScenarioFile, SiteFile
from hetrl.errors import HetrlError, UsageError, nearest
from hetrl.problem import read_experiment
from hetrl.report.tables import add_row, measured_tables, new_table
from hetrl.report.text import figure
from launch.executor import choose_executor
from launch.measure.machine import DEADLINE_SECONDS, DIRECTORY, profile_machine
from launch.measure.remote_task import LOCAL
from launch.measure.run import Found, measure
from launch.measure.stage import Wanted
from launch.show import from_here
from launch.slurm.discover import raise_for

STREAMS = (1, 4, 8)
GPU_MARGIN_SECONDS = 120.0  # to load torch from a shared disk
PERCENTS = (50, 95, 99)
ROUND_TRIPS = f"ms, p{'/'.join(map(str, PERCENTS))}"


def probe_command(arguments: argparse.Namespace) -> int:
    """Measure the links of an experiment's sites, print them, write the dated file."""
    experiment, scenario = read_experiment(arguments.config)
    executor = choose_executor(experiment.launch.executor, scenario.sites)
    if len(scenario.sites) < 2 and executor == LOCAL and not arguments.gpus:
        raise UsageError(f"{arguments.config}: has one site, on this machine; there is no link to measure")
    now, streams = datetime.now(UTC), tuple(sorted(set(arguments.streams or STREAMS)))
    wanted = Wanted(
        links=len(scenario.sites) > 1,
        nodes=True,
        gpus=arguments.gpus,
        streams=streams,
        seconds=arguments.seconds,
        round_trips=arguments.round_trips,
        wait_seconds=arguments.wait or experiment.launch.queue_timeout_seconds,
        gpu_seconds=gpu_seconds(arguments.quick),
        profile=("--quick",) if arguments.quick else (),
    )
    found = measure(scenario.sites, executor, wanted)
    counts = " ".join(f"--streams {count}" for count in streams)
    command = f"hetrl probe {counts} --seconds {wanted.seconds:g} --round-trips {wanted.round_trips}"
    skipped = tuple(Unprobed(what, why) for what, why in found.skipped.items())
    measured = MeasuredLinks(now, command, tuple(found.links), tuple(found.nodes), skipped)
    if arguments.json:
        print(json.dumps(measured.to_json(), indent=2))
    else:
        Console().print(tables(measured, scenario))
    written = write_machines(found.machines.values(), arguments.output, now)
    if measured.links or measured.nodes:
        written.append(arguments.output / file_name(now))
        write_measured_links(written[-1], measured)
    return say_where(written, found)


def profile_command(arguments: argparse.Namespace) -> int:
    """Measure this machine, or the site that `--site` names."""
    return profile_machine(arguments) if arguments.site is None else profile_site(arguments)


def profile_site(arguments: argparse.Namespace) -> int:
    """Measure the GPU types of a site, print the figures, write a file of each."""
    if arguments.config is None or arguments.gpu is not None:
        raise UsageError("--site NAME takes an experiment, `hetrl profile --site NAME CONFIG`, and no --gpu")
    experiment, scenario = read_experiment(arguments.config)
    site = _site(arguments.site, scenario.sites)
    wanted = Wanted(
        links=False,
        nodes=False,
        gpus=True,
        wait_seconds=experiment.launch.queue_timeout_seconds,
        gpu_seconds=gpu_seconds(arguments.quick),
        profile=(
            *(["--quick"] if arguments.quick else []),
            *(["--architecture", arguments.architecture] if arguments.architecture else []),
        ),
    )
    found = measure([site], choose_executor(experiment.launch.executor, [site]), wanted)
    if arguments.json:
        print(json.dumps([one.to_json() for one in found.machines.values()], indent=2))
    else:
        for one in found.machines.values():
            Console().print(measured_tables(one, calibrated().of(one.gpu)))
    return say_where(write_machines(found.machines.values(), arguments.out or DIRECTORY, datetime.now(UTC)), found)


def _site(name: str, sites: tuple[SiteFile, ...]) -> SiteFile:
    """Return the site of this name; raises UsageError that names the nearest one."""
    names = [site.name for site in sites]
    if name not in names:
        raise UsageError(f'--site: there is no site "{name}"{nearest(name, names)}; there are {", ".join(names)}')
    return sites[names.index(name)]


# ---- sites and files


def gpu_seconds(quick: bool) -> float:
    """Return how long `hetrl profile` may take for one type of GPU."""
    return DEADLINE_SECONDS["quick" if quick else "full"] + GPU_MARGIN_SECONDS


def write_machines(machines: Iterable[Measured], directory: Path, now: datetime) -> list[Path]:
    """Write the file of each machine that was measured; returns their paths."""
    paths = []
    for measured in machines:
        directory.mkdir(parents=True, exist_ok=True)
        paths.append(directory / machine_file_name(str(measured.machine["host"]), measured.gpu, now))
        write_measured(paths[-1], measured)
    return paths


def say_where(written: list[Path], found: Found) -> int:
    """Say where the files are; raises PartialError where something was not measured, and what failed for nothing."""
    for path in written:
        print(f"measured into {from_here(path)}", file=sys.stderr)
    raise_for([HetrlError(f"{what}: {why}") for what, why in found.skipped.items()], reached=len(written))
    return 0


# ---- what `hetrl probe` prints


def tables(measured: MeasuredLinks, scenario: ScenarioFile) -> RenderableType:
    """Return the links, the nodes inside sites, and a line for each thing that was not measured."""
    parts: list[RenderableType] = []
    if measured.links:
        written = {frozenset(link.between): f"{figure(link.gbps)} Gbps" for link in scenario.links}
        table = new_table("Links", "from, to", "by", ROUND_TRIPS, _streams(measured.links), "written")
        for one in measured.links:
            ends = (f"{one.source}, {one.target}", one.way, _round_trips(one), _gbps(one))
            add_row(table, *ends, written.get(frozenset((one.source, one.target)), "nothing"))
        parts.append(table)
    if measured.nodes:
        table = new_table("Between two nodes of a site", "site", "by", ROUND_TRIPS, _streams(measured.nodes))
        for one in measured.nodes:
            add_row(table, one.source, one.way, _round_trips(one), _gbps(one))
        parts.append(table)
    parts += [Text(f"not measured: {one.what}: {one.why}") for one in measured.skipped]
    return Group(*parts)


def _round_trips(one: Probed) -> str:
    return "/".join(figure(percentile(one.round_trip_ms, percent)) for percent in PERCENTS)


def _streams(probed: Sequence[Probed]) -> str:
    """Name the column of throughputs; one probe tries the same numbers of streams everywhere."""
    counts = [str(each.streams) for each in probed[0].throughput]
    return f"Gbps, {'/'.join(counts)} stream{'' if counts == ['1'] else 's'}"


def _gbps(one: Probed) -> str:
    return "/".join(figure(each.gbps) for each in one.throughput)
