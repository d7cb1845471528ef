"""`hetrl probe`: measure what lies between the sites of an experiment, on the way that its runs take."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console

from hetrl.describe.measured import Measured, file_name as machine_file_name, write_measured
from hetrl.describe.measured_links import MeasuredLinks, Unprobed, file_name, write_measured_links
from hetrl.errors import HetrlError, UsageError
from hetrl.problem import read_experiment
from launch.executor import choose_executor
from launch.measure.machine import DEADLINE_SECONDS
from launch.measure.probe_report import tables
from launch.measure.probe_run import Found, measure
from launch.measure.probe_stage import LOCAL, Wanted
from launch.measure.remote_task import Executor
from launch.show import from_here
from launch.slurm.discover import raise_for

STREAMS = (1, 4, 8)
GPU_MARGIN_SECONDS = 120.0  # to load torch from a shared disk


def probe_command(arguments: argparse.Namespace) -> int:
    """Measure the links of an experiment's sites, print them, write the dated file."""
    experiment, scenario = read_experiment(arguments.config)
    executor = as_executor(choose_executor(experiment.launch.executor, scenario.sites))
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
        wait_seconds=arguments.wait or experiment.launch.gang_timeout_seconds,
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


def as_executor(name: str) -> Executor:
    """Return the executor of this name."""
    return "slurm" if name == "slurm" else "local"


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
