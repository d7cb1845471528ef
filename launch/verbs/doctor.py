"""`hetrl doctor`: ask every site of an experiment whether a run could start there."""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from hetrl.describe.sites import SiteFile
from hetrl.errors import SiteUnreachableError, UsageError
from hetrl.problem import Problem, read_problem
from hetrl.report.tables import add_row
from launch.executor import SLURM, choose_executor
from launch.findings import Finding, Wish, may_lead, models_found, packages_found, packages_of, wish_of
from launch.slurm.discover import at_every_site
from launch.slurm.doctor import ask, gateway_script, node_scripts
from launch.slurm.preconditions import SLURMCTLD
from launch.slurm.stage import SCRATCH_OF_DRY_RUNS

_MARK = {"ok": "ok", "warning": "warning", "failed": "FAILED"}


def doctor_command(arguments: argparse.Namespace) -> int:
    """Print what holds and what does not at every site; 1 where a precondition fails, 4 where a site is silent.

    With `--deep` a short job on a node of each GPU type looks, too, at the sites where nothing stands in its way.
    """
    problem = read_problem(arguments.config)
    wish, sites = wish_of(problem), problem.scenario.sites
    on_slurm = choose_executor(problem.experiment.launch.executor, sites) == SLURM
    if arguments.deep and not on_slurm:
        raise UsageError("--deep: these sites are this machine; leave it out, or set launch.executor: slurm")
    answers, errors = at_every_site(
        sites, lambda site: examine(problem, site, wish) if on_slurm else examine_here(site, wish)
    )
    findings = [finding for found in answers.values() for finding in found]
    if arguments.deep:
        findings += _deep(problem, [site for site in sites if site.name in answers], findings, wish)
    if sum(map(may_lead, sites)) > 1:  # any of these may be the one that leads, and reads the data
        findings = [_softened(finding) for finding in findings]
    if arguments.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    elif findings:
        Console().print(findings_table(findings))
    for error in errors.values():
        print(f"error: {error}", file=sys.stderr)
    if errors:
        return SiteUnreachableError.exit_code
    return int(any(finding.verdict == "failed" for finding in findings))


def _deep(problem: Problem, sites: Sequence[SiteFile], findings: Sequence[Finding], wish: Wish) -> list[Finding]:
    from launch.measure.deep import look_at_nodes

    refused = {each.site for each in findings if each.verdict == "failed" and each.what in (SLURMCTLD, "scratch")}
    refused |= {each.site for each in findings if each.verdict == "failed" and each.what.startswith("job")}
    fit = [site for site in sites if site.name not in refused]
    return look_at_nodes(problem, fit, wish, problem.experiment.launch.queue_timeout_seconds)


def examine(problem: Problem, site: SiteFile, wish: Wish) -> list[Finding]:
    """Ask one site, about a job on each type of node too; raises SiteUnreachableError where it does not answer."""
    walltime = problem.experiment.launch.walltime
    directory = f"{site.scratch or SCRATCH_OF_DRY_RUNS}/hetrl/doctor/{site.name}"
    given = ("doctor", directory, walltime)
    try:
        scripts = [*node_scripts(problem, site, wish, *given), *gateway_script(problem, site, *given)]
    except UsageError as error:  # the inventory has no such nodes: what the site has now is asked all the same
        return [*ask(site, wish, ()).findings, Finding(site.name, "jobs", "failed", str(error), "run `hetrl discover`")]
    return list(ask(site, wish, scripts).findings)


def _softened(finding: Finding) -> Finding:
    is_failure = finding.what.rpartition(" ")[2] == "data" and finding.verdict == "failed"
    return replace(finding, verdict="warning") if is_failure else finding


def examine_here(site: SiteFile, wish: Wish) -> list[Finding]:
    """Look at what a site of the local executor needs: its processes are this machine's, in this environment."""
    versions = {"python": platform.python_version()}
    packages = {name: wish.versions.get(name) for name in packages_of(site)}
    missing = [model for model in wish.models if not (Path(model) / "config.json").is_file()]
    return [*packages_found(site.name, {**versions, **packages}, wish), *models_found(site.name, wish, missing)]


def findings_table(findings: Sequence[Finding]) -> Table:
    """Return a row per precondition; the remedy stands below what was found."""
    table = Table(title="preconditions", title_justify="left")
    for column in ("site", "what", "", "found"):
        table.add_column(column, overflow="fold")
    for finding in findings:
        text = finding.found + (f"\n-> {finding.remedy}" if finding.remedy else "")
        add_row(table, finding.site, finding.what, _MARK[finding.verdict], text)
    return table
