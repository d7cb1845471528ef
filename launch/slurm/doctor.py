"""`hetrl doctor`: ask every site of an experiment whether a run could start there, one round trip each."""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from importlib import metadata
from pathlib import Path

from rich.console import Console
from rich.table import Table

from hetrl.describe.sites import SiteFile
from hetrl.errors import SiteUnreachableError
from hetrl.problem import PLACES, Problem, read_problem
from launch.executor import SLURM, choose_executor
from launch.run_directory import with_absolute_paths
from launch.shell import Shell
from launch.slurm.discover import at_every_site
from launch.slurm.preconditions import (
    PACKAGES,
    Finding,
    Wish,
    judge,
    models_found,
    packages_found,
    packages_of,
    questions,
)

DOCTOR_SECONDS = 120.0
_ENGINES = ("torch", "megatron-core", "vllm")
_MARK = {"ok": "ok", "warning": "warning", "failed": "FAILED"}


def doctor_command(arguments: argparse.Namespace) -> int:
    """Print what holds and what does not at every site; 1 where a precondition fails, 4 where a site is silent."""
    problem = read_problem(arguments.config)
    wish, sites = wish_of(problem), problem.scenario.sites
    on_slurm = choose_executor(problem.experiment.launch.executor, sites) == SLURM
    answers, errors = at_every_site(sites, lambda site: examine(site, wish) if on_slurm else examine_here(site, wish))
    findings = [finding for found in answers.values() for finding in found]
    if arguments.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    elif findings:
        Console().print(findings_table(findings))
    for error in errors.values():
        print(f"error: {error}", file=sys.stderr)
    if errors:
        return SiteUnreachableError.exit_code
    return int(any(finding.verdict == "failed" for finding in findings))


def examine(site: SiteFile, wish: Wish) -> list[Finding]:
    """Ask one site; raises SiteUnreachableError where it does not answer."""
    shell = Shell(site.name, site.ssh)
    asked_at = time.time()
    done = shell.run(
        ["bash", "-lc", questions(site, [site.place(model) for model in wish.models])], timeout_seconds=DOCTOR_SECONDS
    )
    answered_at = time.time()
    reached = Finding(site.name, "ssh", "ok", f"{site.ssh} answers in {answered_at - asked_at:.1f} s")
    return [reached, *judge(site, done.stdout, wish, asked_at, answered_at)]


def examine_here(site: SiteFile, wish: Wish) -> list[Finding]:
    """Look at what a site of the local executor needs: its processes are this machine's, in this environment."""
    versions = {"python": platform.python_version()}
    packages = {name: wish.versions.get(name) for name in packages_of(site)}
    missing = [model for model in wish.models if not (Path(model) / "config.json").is_file()]
    return [*packages_found(site.name, {**versions, **packages}, wish), *models_found(site.name, wish, missing)]


def wish_of(problem: Problem) -> Wish:
    """Return what a run of an experiment asks of every site."""
    experiment = with_absolute_paths(problem.experiment)
    sections = [(getattr(experiment, section), keys) for section, keys in PLACES.items() if section != "data"]
    named = [value for section, keys in sections for key in keys if (value := getattr(section, key))]
    models = tuple(dict.fromkeys(value for value in named if "/" in value))
    return Wish(experiment.launch.walltime_seconds, installed_versions(), models)


def installed_versions() -> dict[str, str]:
    """Return the versions of the packages here that every site should have; a login node may have few of them."""
    found = {}
    for name in (*PACKAGES, *_ENGINES):
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def findings_table(findings: Sequence[Finding]) -> Table:
    """Return a row per precondition; the remedy stands below what was found."""
    table = Table(title="preconditions", title_justify="left")
    for column in ("site", "what", "", "found"):
        table.add_column(column, overflow="fold")
    for finding in findings:
        text = finding.found + (f"\n-> {finding.remedy}" if finding.remedy else "")
        table.add_row(finding.site, finding.what, _MARK[finding.verdict], text)
    return table
