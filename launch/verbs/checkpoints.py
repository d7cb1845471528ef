"""`hetrl checkpoints` and `hetrl export`: the checkpoints of a run, wherever they lie, and one of them as a model."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Collection, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from hetrl.errors import HetrlError, UsageError
from hetrl.files import read_lines
from hetrl.plan.document import read_plan
from hetrl.plan.plan import Plan, site_of
from hetrl.report.tables import add_row
from hetrl.report.text import byte_figure
from hetrl.runtime.checkpoints.places import EarlierRun
from hetrl.workload import TRAININGS
from launch.run_directory import Run, find_run
from launch.shell import LOCAL, Shell
from launch.show import from_here
from launch.slurm.discover import at_every_site, raise_for
from launch.slurm.run import SlurmRun, read_slurm_run
from launch.verbs.stored import Place, Stored, chosen, fetch_model, newest_of, stored_at


def checkpoints_command(arguments: argparse.Namespace) -> int:
    """Print which checkpoints a run, and those that it went on from, have at every site that answers."""
    run = find_run(arguments.run)
    stored, errors = everywhere(run)
    plan = read_plan(run.path / "plan.json")
    taken = [*newest_of(stored, trained_at(plan), plan.site_order).values()]
    ordered = sorted(stored, key=lambda one: (-one.step, one.task, one.site, one.directory))
    if arguments.json:
        rows = [{**asdict(one), "bytes": one.bytes, "next": one in taken} for one in ordered]
        print(json.dumps(rows, indent=2))
    elif ordered:
        Console().print(_table(ordered, taken))
        roots = dict.fromkeys(f"{one.site}  {one.directory.rpartition('/')[0]}" for one in ordered)
        print("in", *roots, sep="\n  ")
    else:
        print(f"{run.id} has no checkpoint at any site that answers", file=sys.stderr)
    raise_for(list(errors.values()), reached=len(places_of(run)) - len(errors))
    return 0


def export_command(arguments: argparse.Namespace) -> int:
    """Copy the model of a checkpoint, with tokenizer and chat template, to a directory that transformers reads.

    Raises SiteUnreachableError where no site answers, HetrlError where none that answers has the checkpoint.
    """
    run, target = find_run(arguments.run), Path(arguments.directory).absolute()
    if target.exists():
        raise UsageError(f"{target} is there already; name a directory that is not")
    target.parent.mkdir(parents=True, exist_ok=True)
    stored, errors = everywhere(run)
    shells = {place.name: place.shell for place in places_of(run)}
    if len(errors) == len(shells):
        raise_for(list(errors.values()), reached=0)
    for error in errors.values():
        print(f"not asked: {error}", file=sys.stderr)
    candidates = chosen(stored, arguments.step)
    for number, one in enumerate(candidates, 1):
        try:
            fetch_model(one, shells[one.site], target)
        except HetrlError as error:
            if number == len(candidates):
                raise
            print(f"{error}; another site has it, too", file=sys.stderr)
            continue
        print(f"{from_here(target)}: the model after step {one.step}, from {one.site}")
        return 0
    raise AssertionError("a step was chosen that is nowhere")


def places_of(run: Run, without: Collection[str] = ()) -> list[Place]:
    """Return the sites of a run, but for some, with their directories."""
    slurm = read_slurm_run(run)
    known = sorted(path.name for path in (run.path / "sites").iterdir() if (path / "site.json").is_file())
    sites = [site for site in known if site not in without]
    found = history_of(run, slurm, sites)
    shells = {site: slurm.site(site).shell if slurm is not None else Shell(site, LOCAL) for site in sites}
    return [Place(site, shells[site], tuple(found[site])) for site in sites]


def everywhere(run: Run, without: Collection[str] = ()) -> tuple[list[Stored], dict[str, HetrlError]]:
    """Return what all sites of a run, but for some, have that answer, and the errors of the others by site."""
    answers, errors = at_every_site(places_of(run, without), stored_at)
    return [one for found in answers.values() for one in found], errors


def trained_at(plan: Plan) -> dict[str, str]:
    """Return the site of each training's first rank, where its checkpoints are."""
    trainings = {name: task for name, task in plan.tasks.items() if name in TRAININGS}
    return {name: site_of(task.rank_order()[0]) for name, task in trainings.items()}


def history_of(run: Run, slurm: SlurmRun | None, sites: Sequence[str]) -> dict[str, list[EarlierRun]]:
    """Return, by site, its directories of a run and of those that this one went on from, the latest first.

    One that has written no checkpoint has no history of its own: what the runs before it have counts as it did for it.
    """
    found, events = {}, [*read_lines(run.events)]
    wrote = any(event["kind"] == "checkpoint" for event in events)
    taken_up = next((event["step"] for event in events if event["kind"] == "resumed" and wrote), None)
    for site in sites:
        here = run.site(site)
        if (here / "site.json").is_file():
            directory = str(here) if slurm is None else slurm.site(site).directory
            found[site] = [EarlierRun(Path(directory))]
            for earlier in map(EarlierRun.from_json, json.loads((here / "site.json").read_text())["continues"]):
                left_at = min((step for step in (earlier.left_at, taken_up) if step is not None), default=None)
                found[site].append(replace(earlier, left_at=left_at))
    return found


def _table(stored: Sequence[Stored], taken: Sequence[Stored]) -> Table:
    table = Table(title="checkpoints", title_justify="left")
    for column in ("model", "step", "site", "size", "written", ""):
        table.add_column(column, justify="right" if column in ("step", "size") else "left", no_wrap=True)
    for one in stored:
        written = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(one.written))
        standing = "whole" if one.whole else "not whole"
        standing += ", for resume" if one in taken else ""
        model = one.task.removesuffix("_training")
        add_row(table, model, str(one.step), one.site, byte_figure(one.bytes), written, standing)
    return table
