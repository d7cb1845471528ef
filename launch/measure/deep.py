"""`hetrl doctor --deep`: a short job on a node of each GPU type, which looks at what only jobs see.

at every site at once:    copy the directory, submit its jobs         (the scripts and the round trips of a run)
until all have ended:     look, every few seconds; a job that does not start in time is named, with Slurm's reason
on every way out:         cancel what waits or runs, remove the directories
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
from rich.console import Console

from hetrl.describe.sites import SiteFile
from hetrl.problem import Problem
from hetrl.runtime.instruments.node_check import MARK
from launch.findings import Finding, Wish, data_found, models_found, packages_found
from launch.interrupts import ended_by_signals
from launch.shell import LOGIN_BASH
from launch.show import telling_line
from launch.slurm.discover import at_every_site
from launch.slurm.doctor import NODE, node_scripts
from launch.slurm.files import pack
from launch.slurm.poll import Look, parse_poll, poll_script
from launch.slurm.preconditions import knocked
from launch.slurm.render import SiteScript
from launch.slurm.run import SlurmSite
from launch.slurm.stage import job_of, scratch_of, write_script
from launch.slurm.submit import submit_at
from launch.slurm.watch import LOOK_SECONDS, cancel_at

WALLTIME = "00:10:00"  # containers of some GB are unpacked in it
POLL_SECONDS = 5.0


@dataclass(frozen=True)
class NodeFound:
    """What node_check printed: of `models` and `data` what cannot be read, the rest as it is there.

    `granted` are the GPUs that Slurm gave, `seen` those of torch, or why it sees none; None where nobody asked.
    """

    host: str
    python: str
    packages: dict[str, str | None]
    models: list[str]
    data: list[str]
    interfaces: list[str]
    knock: str
    granted: int
    seen: int | str | None


@dataclass(frozen=True)
class DeepSite:
    """A site with its jobs, and the directory here that is copied there."""

    file: SiteFile
    scripts: tuple[SiteScript, ...]
    here: Path
    slurm: SlurmSite

    @property
    def name(self) -> str:
        """Return the site's name."""
        return self.file.name


def look_at_nodes(problem: Problem, sites: Sequence[SiteFile], wish: Wish, wait_seconds: float) -> list[Finding]:
    """Return what jobs found on the nodes of these sites; one that does not start within `wait_seconds` is a failure.

    Raises UsageError for a site file that lacks what a job needs. Interrupted or ended by a signal, it cancels first.
    """
    run_id = f"doctor-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    talk = Console(stderr=True)
    with ended_by_signals(), tempfile.TemporaryDirectory(prefix="hetrl-") as work:
        staged = [_stage(problem, site, wish, run_id, Path(work)) for site in sites]
        with talk.status("a short job at every site"):
            try:
                answers, errors = at_every_site(staged, lambda site: submit_at(site.here, site.slurm))
                refused = {name: taken.problem for name, taken in answers.items() if taken.problem}
                refused |= {name: str(error) for name, error in errors.items()}
                started = [site for site in staged if site.name not in refused]
                looks = _wait(started, wait_seconds)
            finally:
                ended, unreached = at_every_site(staged, lambda site: cancel_at(site.slurm, remove=True))
    findings = [_failed(name, "jobs", why, "correct the site's file") for name, why in refused.items()]
    for site in started:
        findings += [found for script in site.scripts for found in judge_job(site.file, script, looks[site.name], wish)]
    left = {name: remains for name, (_, remains) in ended.items() if remains}
    left |= {name: str(error) for name, error in unreached.items()}
    return findings + [_failed(name, "jobs", why, "cancel by hand what is left") for name, why in left.items()]


def _stage(problem: Problem, site: SiteFile, wish: Wish, run_id: str, work: Path) -> DeepSite:
    directory = f"{scratch_of(site, dry_run=False)}/hetrl/{run_id}/{site.name}"
    scripts = node_scripts(problem, site, wish, run_id, directory, WALLTIME)
    here = work / site.name
    here.mkdir(mode=0o700)
    for script in scripts:
        write_script(here, script)
    pack(here)
    return DeepSite(
        site, scripts, here, SlurmSite(site.name, site.ssh, directory, tuple(map(job_of, scripts)), site.cluster)
    )


def _wait(sites: Sequence[DeepSite], timeout_seconds: float) -> dict[str, Look]:
    """Look at all sites until each one's jobs have ended, or the time is over; return the last look of each."""
    deadline, looks = time.monotonic() + timeout_seconds, {site.name: Look(None, ()) for site in sites}
    while True:
        answers, _ = at_every_site([site for site in sites if not _over(site, looks[site.name])], _look)
        looks |= {name: look for name, look in answers.items() if look.jobs is not None}
        if all(_over(site, looks[site.name]) for site in sites) or time.monotonic() > deadline:
            return looks
        time.sleep(POLL_SECONDS)


def _look(site: DeepSite) -> Look:
    question = poll_script(site.slurm, {})
    return parse_poll(site.slurm.shell.run(LOGIN_BASH, stdin=question, timeout_seconds=LOOK_SECONDS).stdout)


def _over(site: DeepSite, look: Look) -> bool:
    jobs = look.jobs or {}
    return all(script.key in jobs and jobs[script.key].ended for script in site.scripts)


# ---- what the jobs say


def judge_job(site: SiteFile, script: SiteScript, look: Look, wish: Wish) -> Iterator[Finding]:
    """Yield what the job on one type of node found, or why it found nothing."""
    what = script.name.replace(NODE, "node ", 1)
    job = (look.jobs or {}).get(script.key)
    logs = {chunk.name: chunk.data.decode(errors="replace") for chunk in look.chunks}
    own = logs.get(f"logs/{script.name}.log", "")
    said = next((line for line in own.splitlines() if line.startswith(MARK)), None)
    if said is not None:
        try:
            found = msgspec.json.decode(said.removeprefix(MARK), type=NodeFound)
        except msgspec.MsgspecError as error:
            yield _failed(site.name, what, f"what its job printed cannot be read ({error})", "run it again")
            return
        yield from _named(what, judge_node(site, found, wish))
    elif job is None or not job.ended:
        reason = f"it is {job.state} ({job.reason})" if job is not None else look.problem or "Slurm lists it no longer"
        yield _failed(site.name, what, f"its job did not end in time: {reason}", "look at `squeue --me` there")
    else:
        others = "".join(text for name, text in logs.items() if name.startswith(f"logs/{script.name}-"))
        told = telling_line(own) or telling_line(others)
        remedy = "correct setup, container, python, cpu_bind or gres in the site's file"
        yield _failed(site.name, what, f"its job ended: {job.state}{f': {told}' if told else ''}", remedy)


def _named(what: str, findings: Iterator[Finding]) -> Iterator[Finding]:
    """Yield what does not hold, under the name of the node; one line where all does."""
    for finding in findings:
        yield replace(finding, what=what if finding.verdict == "ok" else f"{what}: {finding.what}")


def judge_node(site: SiteFile, found: NodeFound, wish: Wish) -> Iterator[Finding]:
    """Yield the preconditions that do not hold on a node, or one finding that says what it is."""
    bad = [
        *packages_found(site.name, {"python": found.python, **found.packages}, wish),
        *models_found(site.name, wish, found.models, site.place),
        *([data_found(site, wish, there=False)] if found.data else []),
        *_network(site, found),
        *_gpus(site, found),
    ]
    bad = [finding for finding in bad if finding.verdict != "ok"]
    yield from bad
    if not bad:
        gpus = "" if found.seen is None else f", {found.seen} GPUs"
        yield Finding(site.name, "", "ok", f"{found.host}: python {found.python}{gpus}")


def _network(site: SiteFile, found: NodeFound) -> Iterator[Finding]:
    if site.interface and site.interface not in found.interfaces:
        there = ", ".join(found.interfaces)
        remedy = f"set interface in the site's file to one of {there}"
        yield _failed(site.name, "interface", f"{found.host} has no {site.interface}", remedy)
    if found.knock:
        said = f"{knocked(site)} does not answer from {found.host}: {found.knock}"
        yield _failed(
            site.name, site.egress, said, f"correct {site.egress} in the site's file, or ask for that way out"
        )


def _gpus(site: SiteFile, found: NodeFound) -> Iterator[Finding]:
    if found.seen is not None and found.seen != found.granted:
        said = f"torch on {found.host} sees {found.seen}, granted are {found.granted}"
        remedy = "install a torch that fits the nodes' driver; in a container, give it the GPUs"
        yield _failed(site.name, "gpus", said, remedy)


def _failed(site: str, what: str, found: str, remedy: str) -> Finding:
    return Finding(site, what, "failed", found, remedy)
