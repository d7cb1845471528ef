"""The run directory `runs/<name>-<stamp>/`: where each file of a run lies, made by `create_run`, found by `find_run`.

That of a dry run ends in `-dry`: it is no run, and never the latest.

config.yaml plan.json plan.html report.html events.jsonl metrics.jsonl samples.jsonl state.json summary.json
slurm.json                            where the run lies at its Slurm sites
scripts/<site>/{gang,array-*}.json    logs/<site>/<process>.log    checkpoints/
sites/<site>/                         the site's own directory: all that its processes see
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from hetrl.describe.experiment import Experiment
from hetrl.errors import HetrlError, UsageError, nearest
from hetrl.files import replace_json
from hetrl.plan.plan import Plan
from hetrl.problem import with_places
from hetrl.runtime.checkpoints.places import EarlierRun
from hetrl.runtime.gateway.ways import SiteLinks
from hetrl.runtime.wire.keys import SiteKeys, write_keys
from hetrl.runtime.wire.members import everyone
from launch.render import ARRAY, Command, Job
from launch.site_ways import write_relay_keys

LAUNCHER = "launcher"
HOLD_MARGIN_SECONDS = 60
_STAMP = re.compile(r"-(\d{8}-\d{6})(?:-(\d+))?$")


@dataclass(frozen=True)
class Run:
    """The files of one run."""

    path: Path

    @property
    def id(self) -> str:
        """Return the run's name and stamp."""
        return self.path.name

    @property
    def events(self) -> Path:
        """Return the append-only truth about the run."""
        return self.path / "events.jsonl"

    @property
    def metrics(self) -> Path:
        """Return the file with one row per step."""
        return self.path / "metrics.jsonl"

    @property
    def samples(self) -> Path:
        """Return the file with some samples of every step."""
        return self.path / "samples.jsonl"

    @property
    def state(self) -> Path:
        """Return the fold of the events."""
        return self.path / "state.json"

    @property
    def slurm(self) -> Path:
        """Return where the run lies at its Slurm sites; the local executor has none."""
        return self.path / "slurm.json"

    @property
    def summary(self) -> Path:
        """Return what the run achieved; it appears at its end."""
        return self.path / "summary.json"

    @property
    def launcher_log(self) -> Path:
        """Return where a defect of the launcher leaves its traceback."""
        return self.path / "logs" / "launcher.log"

    def site(self, site: str) -> Path:
        """Return a site's own directory."""
        return self.path / "sites" / site

    def log(self, site: str, process: str) -> Path:
        """Return what a process printed."""
        return self.path / "logs" / site / f"{process}.log"


def runs_directory() -> Path:
    """Return HETRL_RUNS, or `runs` in the working directory."""
    return Path(os.environ.get("HETRL_RUNS") or "runs")


def create_run(name: str, config_text: str, plan: Plan, *, dry: bool = False) -> Run:
    """Make the directory of a run that starts now, with its configuration and plan; or of a dry one, that never does.

    Raises HetrlError where the directory cannot be written.
    """
    stamp = time.strftime("%Y%m%d-%H%M%S")
    try:
        run = Run(_make_unique(runs_directory(), f"{name}-{stamp}{'-dry' if dry else ''}"))
        for folder in ("scripts", "logs", "sites"):
            (run.path / folder).mkdir()
        for site in plan.site_order:
            run.site(site).mkdir(mode=0o700)  # keys lie there, and the gateway's unix socket
            (run.path / "logs" / site).mkdir()
        (run.site(plan.lead_site) / "checkpoints").mkdir()
        (run.path / "checkpoints").symlink_to(Path("sites") / plan.lead_site / "checkpoints")
        (run.path / "config.yaml").write_text(config_text, encoding="utf-8")
        replace_json(run.path / "plan.json", plan.to_json())
    except OSError as error:
        where = error.filename or runs_directory()
        raise HetrlError(
            f"{where}: {error.strerror}; a run needs a directory to write to: "
            "start it elsewhere, or set HETRL_RUNS to one"
        ) from None
    return run


def _make_unique(parent: Path, name: str) -> Path:
    """Make `parent/name`, or `name-2`, `name-3`, ... where another run of this second has it."""
    parent.mkdir(parents=True, exist_ok=True)
    for number in range(1, 1000):
        path = parent / (name if number == 1 else f"{name}-{number}")
        try:
            path.mkdir(mode=0o700)  # prompts, samples and logs are nobody else's business
        except FileExistsError:
            continue
        return path.resolve()
    raise HetrlError(f"{parent}: a thousand runs {name} exist already; wait a second")


def find_run(name: str | None) -> Run:
    """Return the run of this id or directory, the latest one for None; raises UsageError where there is none."""
    parent = runs_directory()
    known = sorted(_runs_in(parent), key=_age)
    if name is None:
        if not known:
            raise UsageError(f"{parent}: there is no run yet; start one with `hetrl submit CONFIG`")
        return Run(known[-1].resolve())
    for path in (parent / name, Path(name)):
        if (path / "plan.json").is_file():
            return Run(path.resolve())
    names = [path.name for path in known]
    latest = f"; the latest is {names[-1]}" if names else ""
    raise UsageError(f'there is no run "{name}" in {parent}{nearest(name, names) or latest}')


def _runs_in(parent: Path) -> list[Path]:
    if not parent.is_dir():
        return []
    return [path for path in parent.iterdir() if _STAMP.search(path.name) and (path / "plan.json").is_file()]


def _age(path: Path) -> tuple[str, int]:
    """Order runs by their stamps, and those of one second by their numbers."""
    match = _STAMP.search(path.name)
    return (match[1], int(match[2] or 1)) if match else ("", 0)


def write_scripts(run: Run, jobs: Sequence[Job[Command]]) -> None:
    """Write what each site starts: `gang.json` is a job, `array-*.json` the rows of its tasks."""
    for job in jobs:
        folder = run.path / "scripts" / job.site
        folder.mkdir(exist_ok=True)
        rows = [command.to_json() for command in job.tasks]
        replace_json(folder / f"{job.name}.json", rows if job.kind == ARRAY else {"kind": job.kind, "tasks": rows})


def stage(
    run: Run,
    experiments: Mapping[str, Experiment],
    plan: Plan,
    gpu_by_device: Mapping[str, str],
    held: Mapping[str, int],
    gateways: Mapping[str, str | None],
    keys: Mapping[str, SiteKeys],
    links: Mapping[str, SiteLinks],
    relay_secrets: Mapping[str, str],
    listen: Mapping[str, Mapping[str, Any]] = {},
    continues: Mapping[str, Sequence[EarlierRun]] = {},
) -> None:
    """Put into every site's directory what its processes read.

    `experiments` are the experiment as each site reads it, with paths of its own. `held` counts the devices that the
    jobs hold at each site. `gateways` are the endpoints (tcp://host:port); one that is None is found by the gateway
    itself, which `listen` tells interface and port. `links` are the ways of each site; of `relay_secrets` (by relay) a
    site gets the keys of this run alone, for the relays that it uses. `continues` are, by site, the runs
    that this one goes on from with their directories there, the latest first.
    """
    members = everyone(plan)
    for site in plan.site_order:
        directory, experiment = run.site(site), experiments[site]
        document = yaml.safe_dump(experiment.model_dump(mode="json"), sort_keys=False)
        (directory / "config.yaml").write_text(document, encoding="utf-8")
        replace_json(directory / "plan.json", plan.to_json())
        shared = {"run": run.id, "site": site, "bind": gateways[site]}
        described = {**shared, "lead_site": plan.lead_site, "gpus": dict(gpu_by_device), "held": dict(held)}
        earlier = [one.to_json() for one in continues.get(site, ())]
        going_on = {"goes_on": bool(continues), "continues": earlier}
        replace_json(directory / "site.json", {**described, **going_on})
        # Members start in any order: what is sent to one that is not up yet waits as long as the gang does.
        hold_seconds = experiment.launch.start_seconds + HOLD_MARGIN_SECONDS
        patience = {peer: experiment.launch.patience_seconds(site, peer) for peer in plan.site_order if peer != site}
        known = {
            "members": members,
            "hold_seconds": hold_seconds,
            "patience_seconds": patience,
            "orphan_seconds": experiment.launch.orphan_timeout_seconds,
            "keys": "keys.json",
        }
        connected = {**shared, **listen.get(site, {}), **known}
        relay_keys = write_relay_keys(directory, run.id, links[site], relay_secrets)
        replace_json(directory / "gateway.json", {**connected, **relay_keys, **links[site].to_json()})
        write_keys(directory / "keys.json", keys[site])


def with_absolute_paths(experiment: Experiment) -> Experiment:
    """Return the experiment with the relative paths that exist here made absolute: processes start elsewhere."""
    return with_places(experiment, lambda value: str(Path(value).absolute()) if Path(value).exists() else value)


def lead_site_of(run: Run) -> str:
    """Return the site whose controller leads the run, as its plan says."""
    return str(json.loads((run.path / "plan.json").read_text())["site_order"][0])
