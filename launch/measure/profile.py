"""`hetrl profile`: measure this machine, or by jobs a node of each GPU type of a site."""

from __future__ import annotations

import argparse
import json
from datetime import UTC, datetime

from rich.console import Console

from hetrl.describe.sites import SiteFile
from hetrl.errors import UsageError, nearest
from hetrl.problem import read_experiment
from launch.executor import choose_executor
from launch.measure.machine import DIRECTORY, profile_machine
from launch.measure.probe import as_executor, gpu_seconds, say_where, write_machines
from launch.measure.probe_run import measure
from launch.measure.probe_stage import Wanted


def profile_command(arguments: argparse.Namespace) -> int:
    """Measure this machine, or the site that `--site` names."""
    return profile_machine(arguments) if arguments.site is None else profile_site(arguments)


def profile_site(arguments: argparse.Namespace) -> int:
    """Measure the GPU types of a site, print the figures, write a file of each."""
    from hetrl.cost.efficiency import efficiency
    from hetrl.report.tables import measured_tables

    if arguments.config is None or arguments.gpu is not None:
        raise UsageError("--site NAME takes an experiment, `hetrl profile --site NAME CONFIG`, and no --gpu")
    experiment, scenario = read_experiment(arguments.config)
    site = _site(arguments.site, scenario.sites)
    wanted = Wanted(
        links=False,
        nodes=False,
        gpus=True,
        wait_seconds=experiment.launch.gang_timeout_seconds,
        gpu_seconds=gpu_seconds(arguments.quick),
        profile=(
            *(["--quick"] if arguments.quick else []),
            *(["--architecture", arguments.architecture] if arguments.architecture else []),
        ),
    )
    found = measure([site], as_executor(choose_executor(experiment.launch.executor, [site])), wanted)
    if arguments.json:
        print(json.dumps([one.to_json() for one in found.machines.values()], indent=2))
    else:
        for one in found.machines.values():
            Console().print(measured_tables(one, efficiency(one.gpu)))
    return say_where(write_machines(found.machines.values(), arguments.out or DIRECTORY, datetime.now(UTC)), found)


def _site(name: str, sites: tuple[SiteFile, ...]) -> SiteFile:
    """Return the site of this name; raises UsageError that names the nearest one."""
    names = [site.name for site in sites]
    if name not in names:
        raise UsageError(f'--site: there is no site "{name}"{nearest(name, names)}; there are {", ".join(names)}')
    return sites[names.index(name)]
