"""Measure at the sites of an experiment, by tasks that run there.

at every site at once:    copy the directory; start its tasks (`hetrl remote-task`)
until all are up:         look, every few seconds; a site that is not up in time is left out, and named
at every site at once:    bring the others' addresses, say who is there
until all have ended:     look; then fetch what was measured
on every way out:         cancel what waits or runs, remove the directories
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import msgspec
from rich.console import Console

from hetrl.describe.measured import Measured
from hetrl.describe.measured_files import parse
from hetrl.describe.measured_links import Probed
from hetrl.describe.sites import SiteFile
from hetrl.errors import HetrlError, SiteUnreachableError
from hetrl.runtime.instruments.probe import GO_FILE, LINKS_FILE, Links, most_seconds
from hetrl.runtime.instruments.probe_nodes import MOST_SECONDS as NODES_SECONDS, NODES_FILE
from hetrl.runtime.transport.rendezvous import peer_endpoint
from launch.interrupts import ended_by_signals
from launch.measure.commands import (
    END_SECONDS,
    Look,
    fetch_script,
    look_script,
    parse_fetched,
    parse_look,
    start_script,
    stop_script,
    write_script,
)
from launch.measure.remote_task import LOCAL, Executor
from launch.measure.stage import GPU, LINKS, NODES, ProbeSite, Wanted, stage
from launch.shell import BASH, LOGIN_BASH
from launch.show import telling_line
from launch.slurm.commands import ASK_SECONDS, SBATCH_SECONDS
from launch.slurm.discover import at_every_site
from launch.slurm.files import COPY_SECONDS
from launch.slurm.watch import cancel_at

POLL_SECONDS = 2.0
_Answer = TypeVar("_Answer")


@dataclass
class Found:
    """What was measured: directions of links, nodes of sites, machines by `site task`; and what was not, and why."""

    links: list[Probed] = field(default_factory=list)
    nodes: list[Probed] = field(default_factory=list)
    machines: dict[str, Measured] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)

    def skip(self, what: str, why: object) -> None:
        """Note what was not measured; the first reason stays."""
        self.skipped.setdefault(what, str(why).removeprefix(f"{what}: "))


def measure(files: Sequence[SiteFile], executor: Executor, wanted: Wanted) -> Found:
    """Measure at all sites; what a site or a pair did not do is in the result's `skipped`.

    Raises UsageError for sites that cannot be measured as they are described. Interrupted or ended by a signal, it
    cancels first.
    """
    run, found = f"probe-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}", Found()
    talk = Console(stderr=True)
    with (
        ended_by_signals(),
        tempfile.TemporaryDirectory(prefix="hetrl-") as work,
        talk.status("starting at every site") as status,
    ):
        sites = stage(run, files, executor, Path(work), wanted)
        try:
            answers = _at(sites, start, found)
            started = [site for site in sites if site.name in answers]
            lead = None
            if wanted.links and started:
                status.update(f"waiting for {', '.join(site.name for site in started)}")
                lead = _begin(started, wanted, found)
            status.update("measuring")
            looks = _wait(started, lambda site, look: not _open_tasks(site, look, lead), _most_seconds(wanted, started))
            for site in started:
                for task in _open_tasks(site, looks[site.name], lead):
                    found.skip(_named(site, task), "did not end in time; is its job still in the queue?")
            looks |= _seen(started)  # a probe that ended beside the one that leads, too
            fetched = _at(started, fetch, found)
            for site in (site for site in started if site.name in fetched):
                _read(site, looks[site.name], fetched[site.name], lead, found)
        finally:
            status.update("cleaning up")
            _at(sites, stop, found)
    return found


def _most_seconds(wanted: Wanted, sites: Sequence[ProbeSite]) -> float:
    """Return how long the tasks may take, once the sites have met: other tasks than probes may wait for nodes first."""

    def seconds_of(task: str) -> float:
        if task == LINKS:
            return most_seconds(len(wanted.streams), wanted.seconds, len(sites))
        return wanted.wait_seconds + (NODES_SECONDS if task == NODES else wanted.gpu_seconds)

    return max((seconds_of(task) for site in sites for task in site.tasks), default=0.0)


def _named(site: ProbeSite, task: str) -> str:
    return site.name if task == LINKS else f"{site.name} {task}"


# ---- one site


def start(site: ProbeSite) -> None:
    """Copy a site's directory and start its tasks."""
    if site.executor != LOCAL:
        site.shell.copy_to(site.here, site.there, timeout_seconds=COPY_SECONDS)
    deadline = SBATCH_SECONDS * (1 + len(site.tasks))
    site.shell.check(LOGIN_BASH, stdin=start_script(site), timeout_seconds=deadline, doing="start the tasks")


def look(site: ProbeSite) -> Look | None:
    """Return how far a site is; None where it does not answer now, of which nothing follows."""
    try:
        question = look_script(site)
        return parse_look(
            site.shell.check(BASH, stdin=question, timeout_seconds=ASK_SECONDS, doing="see how far it is")
        )
    except SiteUnreachableError:
        return None


def fetch(site: ProbeSite) -> dict[str, str]:
    """Return the files that a site has measured, and its logs."""
    asked, deadline = fetch_script(site), 2 * ASK_SECONDS
    return parse_fetched(site.shell.check(BASH, stdin=asked, timeout_seconds=deadline, doing="fetch what was measured"))


def stop(site: ProbeSite) -> None:
    """End the tasks of a site and remove its directory; raises HetrlError where a job may be left."""
    if site.executor == LOCAL:
        deadline = ASK_SECONDS + END_SECONDS * len(site.tasks)
        site.shell.check(BASH, stdin=stop_script(site), timeout_seconds=deadline, doing="end the tasks")
    elif remains := cancel_at(site.slurm, remove=True)[1]:
        raise HetrlError(f"{remains}; cancel by hand")


# ---- all sites


def _at(sites: Sequence[ProbeSite], ask: Callable[[ProbeSite], _Answer], found: Found) -> dict[str, _Answer]:
    """Ask all sites at the same time; those that fail are noted."""
    answers, errors = at_every_site(sites, ask)
    for name, error in errors.items():
        found.skip(name, error)
    return answers


def _seen(sites: Sequence[ProbeSite]) -> dict[str, Look]:
    """Return how far those sites are that answer."""
    answers, _ = at_every_site(sites, look)
    return {name: one for name, one in answers.items() if one is not None}


def _wait(
    sites: Sequence[ProbeSite], enough: Callable[[ProbeSite, Look], bool], timeout_seconds: float
) -> dict[str, Look]:
    """Look at all sites until each has done enough, or the time is over; returns the last look at each."""
    deadline, looks = time.monotonic() + timeout_seconds, {site.name: Look() for site in sites}
    while True:
        looks |= _seen([site for site in sites if not enough(site, looks[site.name])])
        if all(enough(site, looks[site.name]) for site in sites) or time.monotonic() > deadline:
            return looks
        time.sleep(POLL_SECONDS)


def _begin(started: Sequence[ProbeSite], wanted: Wanted, found: Found) -> str | None:
    """Wait for every site's probe and bring each the others' addresses; return the site that leads, if two are up."""

    def up_or_over(_: ProbeSite, look: Look) -> bool:
        return look.endpoint is not None or LINKS in look.ended

    looks = _wait(started, up_or_over, wanted.wait_seconds)
    there = [site for site in started if looks[site.name].endpoint is not None]
    for site in started:
        if site not in there and LINKS not in looks[site.name].ended:
            found.skip(site.name, f"its task did not start within {wanted.wait_seconds:g} s; see squeue, raise --wait")
    endpoints = {site.name: str(looks[site.name].endpoint) for site in there}
    if len(there) < 2:
        return None

    def go(site: ProbeSite) -> str:
        peers = {peer_endpoint(peer): f"{endpoint}\n" for peer, endpoint in endpoints.items() if peer != site.name}
        files = {**peers, GO_FILE: json.dumps(list(endpoints))}
        writing = write_script(site, files)
        return site.shell.check(BASH, stdin=writing, timeout_seconds=ASK_SECONDS, doing="say who is there")

    _at(there, go, found)
    return there[0].name


def _open_tasks(site: ProbeSite, look: Look, lead: str | None) -> list[str]:
    """Return the tasks whose end is waited for: of the probes, that of the site that leads."""
    awaited = [task for task in site.tasks if task != LINKS or site.name == lead]
    return [task for task in awaited if task not in look.ended]


# ---- what was measured


def _read(site: ProbeSite, look: Look, texts: Mapping[str, str], lead: str | None, found: Found) -> None:
    """Take over what a site measured; of a task that failed, what its log says.

    A probe that was up and then waited in vain, as no other site was there, has not failed: the others are named.
    """
    for task, code in look.ended.items():
        in_vain = task == LINKS and lead is None and look.endpoint is not None
        if code and task in site.tasks and not in_vain:
            log = telling_line(texts.get(f"logs/{task}.log", "")) or f"exit code {code}"
            found.skip(_named(site, task), log)
    try:
        if site.name == lead and LINKS_FILE in texts:
            links = msgspec.json.decode(texts[LINKS_FILE], type=Links)
            found.links += links.links
            for one in links.skipped:
                found.skip(one.what, one.why)
        if NODES_FILE in texts and NODES in site.tasks:
            found.nodes.append(msgspec.json.decode(texts[NODES_FILE], type=Probed))
    except msgspec.MsgspecError as error:
        found.skip(site.name, f"what it wrote cannot be read ({error})")
    for task in site.tasks:
        if task.startswith(GPU) and f"{task}.json" in texts:
            measured = parse(json.loads(texts[f"{task}.json"]), f"{site.name}: {task}.json")
            if isinstance(measured, Measured):
                found.machines[f"{site.name} {task}"] = measured
