"""`hetrl doctor`: ask every site of an experiment whether a run could start there, one round trip each."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from importlib import metadata

from rich.console import Console
from rich.table import Table

from hetrl.describe.sites import SiteFile
from hetrl.errors import SiteUnreachableError
from hetrl.problem import read_problem
from launch.shell import Shell
from launch.slurm.discover import at_every_site
from launch.slurm.preconditions import PACKAGES, Finding, Wish, judge, questions

DOCTOR_SECONDS = 120.0
_ENGINES = ("torch", "megatron-core", "vllm")
_MARK = {"ok": "ok", "warning": "warning", "failed": "FAILED"}


def doctor_command(arguments: argparse.Namespace) -> int:
    """Print what holds and what does not at every site; 1 where a precondition fails, 4 where a site is silent."""
    problem = read_problem(arguments.config)
    wish = Wish(problem.experiment.launch.walltime_seconds, installed_versions())
    answers, errors = at_every_site(problem.scenario.sites, lambda site: examine(site, wish))
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
    done = shell.run(["bash", "-lc", questions(site)], timeout_seconds=DOCTOR_SECONDS)
    answered_at = time.time()
    reached = Finding(site.name, "ssh", "ok", f"{site.ssh} answers in {answered_at - asked_at:.1f} s")
    return [reached, *judge(site, done.stdout, wish, asked_at, answered_at)]


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
