"""What a site is given for measuring: its directory, and the tasks that run in it.

of its links    probe.json keys.json [relay_keys.json] gateway-<streams>.json    read by hetrl.runtime.instruments.probe
of its tasks    tasks.json code/                                                 read by launch.measure.remote_task
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path

import hetrl
import launch
from hetrl.describe.inventory import Inventory
from hetrl.describe.sites import SiteFile
from hetrl.files import replace_json
from hetrl.runtime.gateway.ways import SiteLinks
from hetrl.runtime.instruments.probe import MEET_SECONDS, PROBE_FILE, ProbeFile, gateway_file, most_seconds
from hetrl.runtime.instruments.probe_nodes import MOST_SECONDS as NODES_SECONDS
from hetrl.runtime.wire import PROBE, address
from hetrl.runtime.wire.keys import make_run_keys, write_keys
from launch.measure.remote_task import LOCAL, SLURM, TASKS_FILE, RemoteJob, RemoteJobs, RemoteTask, key_of
from launch.ports import gateway_endpoints
from launch.render import ARRAY
from launch.shell import Shell
from launch.site_ways import links_of, relay_secrets, write_relay_keys
from launch.slurm.container import python_of, step_options
from launch.slurm.files import copy_code
from launch.slurm.resources import GATEWAY_SHAPE, Shape, node_kinds, resource_options, shape_of, unmanaged_gpus
from launch.slurm.run import SlurmJob, SlurmSite
from launch.slurm.stage import fixed_endpoint, inventories_of, scratch_of, with_endpoint_files

LINKS, NODES, GPU = "links", "nodes", "gpu-"
_TRAINING_GPUS = 2  # that `hetrl profile` takes: an all-reduce needs two


@dataclass(frozen=True)
class Wanted:
    """What is measured: links between all sites, two nodes of each, each type of GPU; `gpu_seconds` is for one type.

    `profile` are more words for `hetrl profile`. A task waits `wait_seconds` for those of other sites.
    """

    links: bool
    nodes: bool
    gpus: bool
    streams: tuple[int, ...] = ()
    seconds: float = 0.0
    round_trips: int = 0
    wait_seconds: float = 0.0
    gpu_seconds: float = 0.0
    profile: tuple[str, ...] = ()


@dataclass(frozen=True)
class ProbeSite:
    """A site with its directory: `here` as it was written, `there` (absolute) where its tasks run."""

    file: SiteFile
    executor: str
    here: Path
    there: str
    tasks: tuple[str, ...]  # each a job of its own
    run: str

    @property
    def name(self) -> str:
        """Return the site's name."""
        return self.file.name

    @property
    def shell(self) -> Shell:
        """Return the site's command line."""
        return self.slurm.shell

    @cached_property
    def slurm(self) -> SlurmSite:
        """Return the site's jobs as Slurm knows them."""
        jobs = (SlurmJob(task, ARRAY, key_of(self.run, task), 0, 0, 1) for task in self.tasks)
        return SlurmSite(self.name, self.file.ssh, self.there, tuple(jobs), self.file.cluster)


def stage(run: str, files: Sequence[SiteFile], executor: str, work: Path, wanted: Wanted) -> tuple[ProbeSite, ...]:
    """Write every site's directory below `work`; the tasks of local sites run right there.

    Raises UsageError for two sites without a way and for a site file that lacks what a job needs, HetrlError for a
    relay's secret that is not here.
    """
    local = executor == LOCAL
    here = {file.name: work / file.name for file in files}
    there = {name: str(path) for name, path in here.items()}
    if not local:
        there = {file.name: f"{scratch_of(file, dry_run=False)}/hetrl/{run}/{file.name}" for file in files}
    inventories = {} if local else inventories_of(files)
    sites = []
    for file in files:
        here[file.name].mkdir(mode=0o700, parents=True)
        jobs = remote_jobs(file, executor, run, there[file.name], wanted, len(files), inventories.get(file.name))
        replace_json(here[file.name] / TASKS_FILE, asdict(jobs))
        if not local:
            copy_code(here[file.name] / "code", hetrl, launch)  # this version: tasks do what this process expects
        tasks = tuple(task.name for job in jobs.jobs for task in job.tasks)
        sites.append(ProbeSite(file, executor, here[file.name], there[file.name], tasks, run))
    if wanted.links:
        _stage_links(run, files, local, here, there, wanted)
    return tuple(sites)


def _stage_links(
    run: str, files: Sequence[SiteFile], local: bool, here: Mapping[str, Path], there: Mapping[str, str], wanted: Wanted
) -> None:
    """Write what the probe of every site reads."""
    endpoints = gateway_endpoints(files) if local else {file.name: fixed_endpoint(file) for file in files}
    links = links_of(files, endpoints)
    secrets = relay_secrets(file for file in files if links[file.name].relays)
    keys = make_run_keys([file.name for file in files])
    ways = {name: {peer: way.way for peer, way in one.links.items()} for name, one in links.items()}
    members = [address(file.name, PROBE, number) for file in files for number in range(len(wanted.streams))]
    for file in files:
        directory, own = here[file.name], links[file.name] if local else with_endpoint_files(links[file.name], there)
        bind = endpoints[file.name] if local else None
        asked = ProbeFile(
            run, file.name, bind, wanted.streams, wanted.seconds, wanted.round_trips, wanted.wait_seconds, ways
        )
        replace_json(directory / PROBE_FILE, asdict(asked))
        write_keys(directory / "keys.json", keys[file.name])
        listen = {"bind": bind, "interface": file.interface, "port": file.gateway_port}
        _write_gateways(
            directory, asked, {**listen, "members": members, "hold_seconds": wanted.wait_seconds}, own, secrets
        )


def _write_gateways(
    directory: Path, asked: ProbeFile, listen: Mapping[str, object], links: SiteLinks, secrets: Mapping[str, str]
) -> None:
    """Write the gateways of a site; they differ in the number of streams alone."""
    relay_keys = write_relay_keys(directory, asked.run, links, secrets)
    described = {"run": asked.run, "site": asked.site, "keys": "keys.json", **listen, **relay_keys}
    described["patience_seconds"] = dict.fromkeys(links.links, MEET_SECONDS)  # pairs without one that is gone wait
    for streams in asked.streams:
        ways = {peer: replace(way, streams=streams) for peer, way in links.links.items()}
        replace_json(directory / gateway_file(streams), {**described, **replace(links, links=ways).to_json()})


# ---- tasks


def remote_jobs(
    file: SiteFile,
    executor: str,
    key: str,
    directory: str,
    wanted: Wanted,
    sites: int,
    inventory: Inventory | None = None,
) -> RemoteJobs:
    """Return the jobs of one of so many sites: its probe, two of its nodes, and one per type of GPU."""
    jobs = tuple(_jobs(file, executor, wanted, sites, inventory))
    if executor == LOCAL:
        return RemoteJobs(LOCAL, key, shlex.quote(sys.executable), (), jobs)
    jobs = tuple(replace(job, srun=(*step_options(file, directory), *job.srun)) for job in jobs)
    code = f"{directory}/code"
    lines = file.setup_lines
    setup = [shlex.join([".", f"{code}/launch/remote/setup.sh", *lines])] if lines else []
    setup.append(f"export PYTHONPATH={shlex.quote(code)} PYTHONUNBUFFERED=1")
    return RemoteJobs(SLURM, key, shlex.join(python_of(file, directory)), tuple(setup), jobs)


def _jobs(
    file: SiteFile, executor: str, wanted: Wanted, sites: int, inventory: Inventory | None
) -> Iterator[RemoteJob]:
    def options(shape: Shape, nodes: int, seconds: float) -> tuple[str, ...]:
        if executor == LOCAL:
            return ()
        minutes = int(seconds // 60) + 1
        found = resource_options(file, shape, nodes, f"{minutes // 60:02}:{minutes % 60:02}:00", inventory)
        return found if shape.whole else (*found, f"--cpus-per-task={max(1, shape.devices) * file.cpus_per_gpu}")

    prefix = file.prefix if executor == LOCAL else ()  # elsewhere it is part of the interpreter that submitit starts
    if wanted.links:
        seconds = wanted.wait_seconds + most_seconds(len(wanted.streams), wanted.seconds, sites)
        task = RemoteTask(LINKS, (*prefix, "python", "-m", "hetrl.runtime.instruments.probe"))
        yield RemoteJob(LINKS, (task,), seconds, 1, options(GATEWAY_SHAPE, 1, seconds))
    if wanted.nodes and executor == SLURM and sum(entry.count for entry in file.nodes) > 1:
        interface = ("--interface", file.interface) if file.interface else ()
        streams = [word for count in wanted.streams for word in ("--streams", str(count))]
        argv = ("python", "-m", "hetrl.runtime.instruments.probe_nodes", "--site", file.name, *streams, *interface)
        task = RemoteTask(NODES, (*argv, "--seconds", f"{wanted.seconds:g}", "--round-trips", str(wanted.round_trips)))
        srun = (f"--mpi={file.mpi}",)
        yield RemoteJob(NODES, (task,), NODES_SECONDS, 2, options(GATEWAY_SHAPE, 2, NODES_SECONDS), srun)
    for entry in node_kinds(file) if wanted.gpus else ():
        name = f"{GPU}{entry.gpu}"
        argv = (*prefix, "python", "-m", "launch.cli", "profile", "--gpu", entry.gpu, "--out", f"{name}.json")
        gpus = min(entry.gpus, _TRAINING_GPUS)
        shape = shape_of(file, entry.nodes()[0], gpus)
        more = options(shape, 1, wanted.gpu_seconds)
        task, unmanaged = RemoteTask(name, (*argv, *wanted.profile)), unmanaged_gpus(file, [shape])
        yield RemoteJob(name, (task,), wanted.gpu_seconds, 1, more, (), gpus, unmanaged)
