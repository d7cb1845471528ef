"""Ask one site whether a run could start there: a round trip, for `hetrl doctor` and for the preflight.

Beside what preconditions.py judges, `sbatch --test-only` of each script says when its job would start, and queues
nothing (sbatch(1)).
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from hetrl.describe.sites import SiteFile
from hetrl.gpus import is_cpu
from hetrl.problem import Problem
from hetrl.runtime.run.step import StepProcess
from launch.findings import Finding, Wish, may_lead, packages_of
from launch.remote import Part, parse
from launch.render import VISIBLE
from launch.shell import LOGIN_BASH, Shell
from launch.show import moment
from launch.slurm.commands import last_line
from launch.slurm.preconditions import judge, knocked, questions
from launch.slurm.render import SiteScript, task_script
from launch.slurm.resources import GATEWAY_SHAPE, Shape, node_kinds, shape_of
from launch.slurm.stage import inventories_of

DOCTOR_SECONDS = 180.0
NODE = "node-"  # how the name of a job begins that looks at a node; the GPU's type follows
_START = re.compile(r"Job \d+ to start at (\S+)")


@dataclass(frozen=True)
class Answer:
    """What one site said: what holds and what does not, and when each job would start (seconds since the epoch)."""

    findings: tuple[Finding, ...]
    starts: Mapping[str, float]


def ask(site: SiteFile, wish: Wish, scripts: Sequence[SiteScript]) -> Answer:
    """Ask a site, about these jobs too; raises SiteUnreachableError where it does not answer."""
    shell = Shell(site.name, site.ssh)
    asked_at = time.time()
    question = questions(site, wish, {script.name: script.text for script in scripts})
    done = shell.run(LOGIN_BASH, stdin=question, timeout_seconds=DOCTOR_SECONDS)
    answered_at = time.time()
    reached = Finding(site.name, "ssh", "ok", f"{site.ssh} answers in {answered_at - asked_at:.1f} s")
    tested, starts = read_tests(site.name, done.stdout, scripts)
    return Answer((reached, *judge(site, done.stdout, wish, asked_at, answered_at), *tested), starts)


def read_tests(site: str, text: str, scripts: Sequence[SiteScript]) -> tuple[list[Finding], dict[str, float]]:
    """Return a finding per job, and the starts that Slurm expects."""
    parts, findings, starts = parse(text), [], {}
    for script in scripts:
        said = parts.get(f"test {script.name}", Part()).text
        what = f"job {script.name}"
        if match := _START.search(said):
            starts[script.name] = datetime.fromisoformat(match[1]).replace(tzinfo=UTC).timestamp()
            findings.append(Finding(site, what, "ok", f"would start {moment(starts[script.name])}"))
        else:
            remedy = "correct the site's file (partitions, account, qos, gres, nodes, sbatch), or launch.walltime"
            findings.append(Finding(site, what, "failed", last_line(said) or "sbatch did not answer", remedy))
    return findings, starts


# ---- the jobs of doctor, which need no plan


def node_scripts(
    problem: Problem, site: SiteFile, wish: Wish, run_id: str, directory: str, walltime: str
) -> tuple[SiteScript, ...]:
    """Return a job for each type of GPU of a site that looks at its node, as a run's processes would find it.

    Raises UsageError for nodes that the site's inventory does not have.
    """
    scripts = []
    for entry in node_kinds(site):
        shape = shape_of(site, entry.nodes()[0], 1)
        asked = {
            "packages": packages_of(site),
            "models": [site.place(model) for model in wish.models],
            "data": [site.place(wish.data)] if wish.data and may_lead(site) else [],
            "interface": site.interface,
            "knock": knocked(site),
            "gpus": not is_cpu(entry.gpu),
        }
        argv = ("python", "-m", "hetrl.runtime.instruments.node_check", json.dumps(asked))
        gpus = "" if is_cpu(entry.gpu) else ",".join(map(str, range(shape.devices)))
        process = StepProcess(f"{NODE}{entry.gpu}", argv, {VISIBLE: gpus})
        scripts.append(_script(problem, site, shape, process, run_id, directory, walltime))
    return tuple(scripts)


def gateway_script(
    problem: Problem, site: SiteFile, run_id: str, directory: str, walltime: str
) -> Iterator[SiteScript]:
    """Yield the job of a gateway alone, as a site that grants single GPUs gets it."""
    if site.allocation == "gpu":
        process = StepProcess("gateway", ("python", "-c", ""), {})
        yield _script(problem, site, GATEWAY_SHAPE, process, run_id, directory, walltime)


def _script(
    problem: Problem, site: SiteFile, shape: Shape, process: StepProcess, run_id: str, directory: str, walltime: str
) -> SiteScript:
    return task_script(
        problem,
        site.name,
        process.name,
        shape,
        process,
        run_id=run_id,
        directory=directory,
        walltime=walltime,
        inventories=inventories_of([site]),
    )
