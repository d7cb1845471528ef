"""Compare the planner with other systems on the paper's scenarios: ratios predicted and played, and the paper's.

for each scenario, model and algorithm
  sync: the planner, verl, verl-expert; async: the planner, StreamRL, AReaL-Hex; verl and StreamRL by each definition
all GPUs over those of one type alone; each plan also played by the simulator
a cell of the paper (ratio, scenario): the mean of the ratios over models and algorithms, inside its range or not

The knobs are in `paper.yaml`. Without FULL=1 (or --full) only its `sample` runs, some minutes. A run that is stopped
goes on where it was with the same --kept, as long as neither knobs nor planner change.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from _paper_cases import Asked, Knobs, asked
from _paper_figures import Outcome, Trend
from _paper_page import page
from _paper_plans import Made, make, record, recorded, shown
from _results import RESULTS, write_page, write_result

from hetrl.describe.yaml_file import read_yaml

HERE = Path(__file__).resolve().parent


def paged(knobs: Knobs, made: dict[Asked, Made], full: bool) -> tuple[str, dict[str, Any]]:
    """Return the page and the figures, with the paper's ranges and trends from their files."""
    paper, trends = (
        yaml.safe_load((HERE / "data" / f"paper_{name}.yaml").read_text()) for name in ("results", "trends")
    )
    known = [Trend(tuple(one["of"]), tuple(one["to"]), one["reason"]) for one in trends]
    ranges = {
        name: {scenario: tuple(own) for scenario, own in cells.items()} for name, cells in paper["ratios"].items()
    }
    alone_range = tuple(paper["other"]["all_64_over_24_a100_only_8b"])
    return page(Outcome(knobs, ranges, made, full), known, alone_range)


def again(knobs: Knobs, name: str, full: bool) -> str:
    """Make the page of the last result from the plans that it has kept, and return it."""
    path = RESULTS / f"{name}.json"
    document = json.loads(path.read_text())
    made = {one.asked: one for one in map(recorded, document["plans"])}
    table, figures = paged(knobs, made, full)
    path.write_text(json.dumps({**document, **figures, "table": table}, indent=1) + "\n")
    write_page()
    return table


def all_made(wanted: Sequence[Asked], knobs: Knobs, jobs: int, kept: Path | None) -> dict[Asked, Made]:
    """Make the plans that the file does not have, adding each to it, and return all of those wanted."""
    lines = kept.read_text().splitlines() if kept and kept.exists() else []
    found = {one.asked: one for one in map(recorded, map(json.loads, lines))}
    left = [one for one in wanted if one not in found]
    with ProcessPoolExecutor(jobs) as pool, (kept or Path(os.devnull)).open("a") as file:
        for made in pool.map(partial(make, knobs=knobs), left):
            found[made.asked] = made
            print(json.dumps(record(made)), file=file, flush=True)
            print(f"{len(found)} of {len(wanted)}: {shown(made)}", file=sys.stderr, flush=True)
    return {one: found[one] for one in wanted}


def main() -> None:
    """Run all, write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--full", action="store_true", help="all models and the sensitivity (also: FULL=1)")
    parser.add_argument("--scenario", action="append", help="only this one (may be repeated); nothing is written")
    parser.add_argument("--evaluations", type=int, help="of each search of the planner; nothing is written")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="plans made at the same time (all cores)")
    parser.add_argument("--kept", type=Path, help="a file for the plans as they are made, for a run that is stopped")
    parser.add_argument("--again", action="store_true", help="make the page of the last result anew, plan nothing")
    if os.environ.get("FULL") == "1" and "--full" not in sys.argv:
        sys.argv.append("--full")  # so that the result names the whole command
    arguments = parser.parse_args()
    knobs = read_yaml(HERE / "paper.yaml", Knobs)
    name = "paper" if arguments.full else "paper-sample"
    if arguments.again:
        print(again(knobs, name, arguments.full))
        return
    if arguments.evaluations:
        knobs = knobs.model_copy(update={"evaluations": arguments.evaluations})
    wanted = [
        one for one in asked(knobs, arguments.full) if one.case.scenario in (arguments.scenario or knobs.scenarios)
    ]
    plans = all_made(wanted, knobs, arguments.jobs, arguments.kept)
    table, figures = paged(knobs, plans, arguments.full)
    if not (arguments.scenario or arguments.evaluations):
        kept = [record(made) for made in plans.values()]
        write_result(name, {"knobs": knobs.model_dump(), **figures, "plans": kept}, table)
    print(table)


if __name__ == "__main__":
    main()
