"""Before anything is submitted: ask every site whether it would take the jobs, and show what the run asks for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from rich.table import Table

from hetrl.describe.launching import Launch
from hetrl.describe.sites import SiteFile
from hetrl.errors import HetrlError, SiteUnreachableError
from hetrl.plan.plan import Plan
from hetrl.problem import Problem
from launch.findings import Finding, Wish, wish_of
from launch.show import moment
from launch.slurm.commands import NO_ANSWER
from launch.slurm.discover import at_every_site, raise_for
from launch.slurm.doctor import Answer, ask
from launch.slurm.preconditions import SLURMCTLD
from launch.slurm.render import SiteScript


def preflight(problem: Problem, scripts: Sequence[SiteScript]) -> dict[str, Answer]:
    """Ask all sites at the same time.

    Raises SiteUnreachableError where one or its Slurm does not answer, HetrlError with all that stands in the way.
    """
    wish = wish_of(problem)
    used = {script.site for script in scripts}
    sites = [site for site in problem.scenario.sites if site.name in used]

    lead = scripts[0].site

    def answer(site: SiteFile) -> Answer:
        own = [script for script in scripts if script.site == site.name]
        return _answer(site, own, wish if site.name == lead else replace(wish, data=""))

    answers, errors = at_every_site(sites, answer)
    raise_for(errors.values(), reached=0)
    failed = [finding for answer in answers.values() for finding in answer.findings if finding.verdict == "failed"]
    if failed:
        lines = [f"{each.site}: {each.what}: {each.found}; {each.remedy}" for each in failed]
        silent = any(finding.what == SLURMCTLD or NO_ANSWER.search(finding.found) for finding in failed)
        raise (SiteUnreachableError if silent else HetrlError)("\n".join(lines))
    return answers


def _answer(site: SiteFile, scripts: Sequence[SiteScript], wish: Wish) -> Answer:
    said = ask(site, wish, scripts)
    return Answer((*map(_softened, said.findings), *_budget(site, scripts, wish)), said.starts)


def _softened(finding: Finding) -> Finding:
    """Let the site's whole inventory be a warning: whether this plan's jobs fit, sbatch says."""
    about_nodes = finding.what == "gpus" or finding.what.startswith("nodes ")
    return replace(finding, verdict="warning") if about_nodes and finding.verdict == "failed" else finding


def _budget(site: SiteFile, scripts: Sequence[SiteScript], wish: Wish) -> Iterator[Finding]:
    hours = sum(script.gpus for script in scripts) * wish.walltime_seconds / 3600
    if site.budget_gpu_hours is not None and hours > site.budget_gpu_hours:
        found = f"the run may spend {hours:,.0f} GPU-hours, budget_gpu_hours is {site.budget_gpu_hours:,.0f}"
        yield Finding(site.name, "budget", "failed", found, "lower launch.walltime, or raise budget_gpu_hours")


def preview_table(problem: Problem, plan: Plan, scripts: Sequence[SiteScript], answers: Mapping[str, Answer]) -> Table:
    """Return a row per site: what is submitted, when it would start, and what it costs at most."""
    launch = problem.experiment.launch
    table = Table(title=f"jobs, each for at most {launch.walltime}", title_justify="left")
    table.add_column("site")
    table.add_column("jobs", overflow="fold")
    table.add_column("starts")
    for column in ("nodes", "GPUs", "GPU-h", "idle", "GB/step"):
        table.add_column(column, justify="right")
    last = max((start for answer in answers.values() for start in answer.starts.values()), default=0.0)
    for site in plan.site_order:
        own = [script for script in scripts if script.site == site]
        sent_gb = sum(plan.predicted.wan_gb_per_iteration.get(f"{site}-{other}", 0.0) for other in plan.site_order)
        table.add_row(site, *_cells(own, answers[site].starts, last, launch), f"{sent_gb:,.2f}")
    worst = sum(script.gpus for script in scripts) * launch.queue_timeout_seconds / 3600
    table.caption = (
        "GPU-h: GPU-hours if it takes the whole time; GB/step: sent to other sites;\n"
        "idle: GPU-hours until the last job starts, as Slurm expects it;\n"
        f"at worst {worst:,.0f}, where all wait launch.queue_timeout for one"
        + "".join(_queue_line(site, answers[site]) for site in plan.site_order)
    )
    table.caption_justify = "left"
    return table


def _queue_line(site: str, answer: Answer) -> str:
    return "".join(f"\n{site} now: {finding.found}" for finding in answer.findings if finding.what == "queue")


def _cells(scripts: Sequence[SiteScript], starts: Mapping[str, float], last: float, launch: Launch) -> tuple[str, ...]:
    """Return the jobs of a site, their start, nodes, GPUs, GPU-hours, and those that wait for `last`.

    A job waits for the one that starts last, at any site, and no longer than queue_timeout.
    """
    waits = ((script.gpus, last - starts.get(script.name, last)) for script in scripts)
    idle_hours = sum(gpus * min(seconds, launch.queue_timeout_seconds) for gpus, seconds in waits) / 3600
    gpus = sum(script.gpus for script in scripts)
    return (
        ", ".join(script.name + (f" x{script.array_tasks}" if script.array_tasks else "") for script in scripts),
        moment(max(starts.values())) if starts else "unknown",
        str(sum(script.nodes for script in scripts)),
        str(gpus),
        f"{gpus * launch.walltime_seconds / 3600:,.0f}",
        f"{idle_hours:,.1f}",
    )
