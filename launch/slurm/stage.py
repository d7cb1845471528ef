"""Stage a run for Slurm: the run directory with what each site's own directory will hold, scripts included."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hetrl.cost.charges import held_by_site
from hetrl.describe.inventory import Inventory, read_inventory
from hetrl.describe.sites import SiteFile
from hetrl.describe.yaml_file import find
from hetrl.errors import UsageError
from hetrl.files import replace_text
from hetrl.plan.plan import Plan, site_of
from hetrl.problem import Problem, with_places
from hetrl.runtime.checkpoints.places import EarlierRun
from hetrl.runtime.emulated.costs import write_costs
from hetrl.runtime.gateway.ways import SiteLinks, Way
from hetrl.runtime.transport.rendezvous import GATEWAY_ENDPOINT, peer_endpoint
from hetrl.runtime.wire.keys import make_run_keys
from launch.ports import LOOPBACK
from launch.render import ARRAY
from launch.run_directory import Run, create_run, stage, with_absolute_paths
from launch.shell import LOCAL
from launch.site_ways import links_of, relay_secrets
from launch.slurm.render import SiteScript, site_scripts
from launch.slurm.run import Carried, SlurmJob, SlurmRun, SlurmSite

MEASURED = Path("topology/measured")
SCRATCH_OF_DRY_RUNS = "/scratch"


@dataclass(frozen=True)
class Staged:
    """A run that can be submitted; `directories` are where each site's directory goes at its cluster."""

    run: Run
    scripts: tuple[SiteScript, ...]
    directories: Mapping[str, str]
    carried: tuple[Carried, ...]


def stage_slurm(
    problem: Problem,
    plan: Plan,
    config: Path,
    *,
    continues: Mapping[str, Sequence[EarlierRun]] = {},
    dry_run: bool = False,
) -> Staged:
    """Make the run directory with all that its sites read (`continues`: see `stage`); nothing is copied or submitted.

    A dry run does without the secrets of relays, and takes /scratch where a site's file names no directory. Raises
    UsageError for a site file that lacks what a job needs and for two sites without a way, HetrlError where the
    directory cannot be written.
    """
    used = [site for site in problem.scenario.sites if site.name in plan.site_order]
    links = links_of(used, {site.name: fixed_endpoint(site) for site in used}, plan.weight_sync.routes)
    relays = sorted({relay for one in links.values() for relay in one.relays})
    secrets = dict.fromkeys(relays, "") if dry_run else relay_secrets(site for site in used if links[site.name].relays)
    templates = problem.experiment.launch.templates
    folder = find(templates, [Path(), config.parent], f"{config}: launch.templates") if templates else None
    scratch = {site.name: scratch_of(site, dry_run) for site in used}
    keys = make_run_keys(plan.site_order)
    run = create_run(problem.experiment.name, config.read_text(encoding="utf-8"), plan, dry=dry_run)
    directories = {site: f"{parent}/hetrl/{run.id}/{site}" for site, parent in scratch.items()}
    links = {site: with_endpoint_files(one, directories) for site, one in links.items()}
    scripts = site_scripts(plan, problem, run.id, directories, inventories_of(used), folder)
    gpus = {device.id: device.gpu for device in problem.topology.devices}
    listen = {site.name: {"interface": site.interface, "port": site.gateway_port} for site in used}
    held = held_by_site(plan, problem.topology)
    experiment = with_absolute_paths(problem.experiment)
    experiments = {site.name: with_places(experiment, site.place) for site in used}
    stage(run, experiments, plan, gpus, held, dict.fromkeys(plan.site_order), keys, links, secrets, listen, continues)
    for site in plan.site_order if problem.experiment.launch.emulates else ():
        write_costs(run.site(site), problem.model)
    write_site_scripts(run, scripts)
    return Staged(run, scripts, directories, tuple(carried_files(links, directories)))


def describe(problem: Problem, plan: Plan, staged: Staged) -> SlurmRun:
    """Return where the jobs of a staged run lie."""
    launch = problem.experiment.launch
    trainings = (task for task in plan.tasks.values() if task.engine == "megatron")
    trains = {site_of(device) for task in trainings for device in task.devices}

    def spare(script: SiteScript) -> bool:
        return script.kind == ARRAY or script.site not in trains

    files = {site.name: site for site in problem.scenario.sites}
    sites = tuple(
        SlurmSite(
            name,
            files[name].ssh,
            staged.directories[name],
            tuple(job_of(script, spare(script)) for script in staged.scripts if script.site == name),
            files[name].cluster,
        )
        for name in plan.site_order
    )
    seconds = launch.poll_seconds, launch.queue_timeout_seconds
    return SlurmRun(sites, staged.carried, *seconds, launch.begins_without)


def job_of(script: SiteScript, spare: bool = False) -> SlurmJob:
    """Return the job that a script becomes."""
    return SlurmJob(script.name, script.kind, script.key, script.nodes, script.gpus, script.array_tasks, spare)


def scratch_of(site: SiteFile, dry_run: bool) -> str:
    """Return the site's scratch directory; raises UsageError where it is not an absolute path."""
    if site.scratch is None and dry_run:
        print(f"{site.name}: no `scratch` in the site's file, {SCRATCH_OF_DRY_RUNS} stands for it", file=sys.stderr)
        return SCRATCH_OF_DRY_RUNS
    if site.scratch is None or not site.scratch.startswith("/"):
        raise UsageError(
            f"{site.name}: scratch is {site.scratch or 'not set'}; set it in the site's file to the absolute path of a "
            "directory that login and compute nodes share"
        )
    return site.scratch.rstrip("/")


def fixed_endpoint(site: SiteFile) -> str:
    """Return where others find a gateway whose host and port are fixed in the site's file, else nothing."""
    fixed = site.gateway_port and site.gateway_host != LOOPBACK
    return f"tcp://{site.gateway_host}:{site.gateway_port}" if fixed else ""


def inventories_of(sites: Sequence[SiteFile]) -> dict[str, Inventory]:
    """Return what `hetrl discover` measured of the sites: the file that a site names, else the usual one."""
    paths = {site.name: Path(site.inventory or MEASURED / f"{site.name}.json") for site in sites}
    return {site: read_inventory(path) for site, path in paths.items() if path.is_file()}


def with_endpoint_files(links: SiteLinks, directories: Mapping[str, str]) -> SiteLinks:
    """Return the links of a site with the files that tell where gateways listen which Slurm is yet to place."""
    return replace(links, links={peer: _told(peer, way, directories[peer]) for peer, way in links.links.items()})


def _told(peer: str, way: Way, directory: str) -> Way:
    if way.way == "ssh":  # the tunnel goes on from the login node, so that it needs the node's own address
        return replace(way, endpoint="", endpoint_file=f"{directory}/{GATEWAY_ENDPOINT}")
    if way.way in ("direct", "proxy") and not way.endpoint:
        return replace(way, endpoint_file=peer_endpoint(peer))
    return way


def carried_files(links: Mapping[str, SiteLinks], directories: Mapping[str, str]) -> Iterator[Carried]:
    """Yield what the launcher brings from site to site."""
    for site, one in links.items():
        for peer, way in one.links.items():
            if way.way in ("direct", "proxy") and way.endpoint_file is not None:
                origin = f"{directories[peer]}/{GATEWAY_ENDPOINT}"
                yield Carried(peer, site, origin, f"{directories[site]}/{way.endpoint_file}")


def write_site_scripts(run: Run, scripts: Sequence[SiteScript]) -> None:
    """Write scripts and rows to `scripts/` in each site's directory; `scripts/<site>` of the run leads there."""
    for script in scripts:
        write_script(run.site(script.site), script)
        link = run.path / "scripts" / script.site
        if not link.is_symlink():
            link.symlink_to(Path("..") / "sites" / script.site / "scripts")


def write_script(directory: Path, script: SiteScript) -> None:
    """Write a script and its rows into a site's own directory."""
    for folder in ("scripts", "logs", "peers"):
        (directory / folder).mkdir(exist_ok=True)
    replace_text(directory / "scripts" / f"{script.name}.sbatch", script.text)
    replace_text(directory / "scripts" / f"{script.name}.json", script.rows_text)


def sbatch_argv(directory: str, script: SiteScript) -> tuple[str, ...]:
    """Return the command that submits a script at its site."""
    return ("sbatch", "--parsable", f"{directory}/scripts/{script.name}.sbatch")


def dry_run_text(staged: Staged, files: Mapping[str, SiteFile]) -> str:
    """Return what would be run at every site: the copy of its directory, and its sbatch lines.

    Above them stands what the site's file says of how its jobs run.
    """
    lines = []
    for site, directory in staged.directories.items():
        host, make, source = files[site].ssh, ("mkdir", "-p", directory), f"{staged.run.site(site)}/"
        if host == LOCAL:
            lines += [
                f"# {site}",
                *settings_lines(files[site]),
                shlex.join(make),
                shlex.join(("rsync", "-a", source, f"{directory}/")),
            ]
        else:
            there = ("ssh", host, shlex.join(make))
            copy = ("rsync", "-a", source, f"{host}:{directory}/")
            lines += [f"# {site}, on {host}", *settings_lines(files[site]), shlex.join(there), shlex.join(copy)]
        lines += [
            f"{shlex.join(sbatch_argv(directory, script))}  # {_size(script)}"
            for script in staged.scripts
            if script.site == site
        ]
    return "\n".join(lines)


def settings_lines(site: SiteFile) -> Iterator[str]:
    """Yield `#   key: value` for each key of a site's file that says how jobs run there, where it is set."""
    found: dict[str, Sequence[str]] = {"setup": site.setup_lines}
    if (container := site.container) is not None:
        found["container"] = (f"{container.image} by {container.runtime}",)
        found |= {"container binds": container.binds, "container options": container.options}
    found["paths"] = tuple(f"{name} is {place}" for name, place in site.paths.items())
    for key, default in (("gpu_request", "gres"), ("cpu_bind", "none"), ("interface", None)):
        value = getattr(site, key)
        found[key] = (value,) if value != default else ()
    found |= {"sbatch": site.sbatch, "gateway_sbatch": site.gateway_sbatch}
    yield from (f"#   {key}: {value}" for key, values in found.items() for value in values)


def _size(script: SiteScript) -> str:
    """Say how large a job is: `2 nodes, 8 GPUs`."""
    count, what = (script.array_tasks, "task") if script.array_tasks else (script.nodes, "node")
    return f"{count} {what}{'' if count == 1 else 's'}, {script.gpus} GPU{'' if script.gpus == 1 else 's'}"
