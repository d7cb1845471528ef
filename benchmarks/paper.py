"""Compare the planner with other systems on the paper's scenarios: ratios predicted by our model, and the paper's.

for each scenario, model and algorithm
  sync: the planner, verl, verl-expert; async: the planner, StreamRL, AReaL-Hex; each plan also played by the simulator
a cell of the paper (ratio, scenario): the mean of the ratios over models and algorithms, inside its range or not

The knobs are in `paper.yaml`. Without FULL=1 (or --full) only its `sample` runs, some minutes.
"""

from __future__ import annotations

import argparse
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import yaml
from _paper_cases import Case, Knobs, Made, Outcome, cases, problem
from _paper_page import page
from _results import write_result

from hetrl.describe.yaml_file import read_yaml
from hetrl.errors import InfeasibleError
from hetrl.search import solve
from hetrl.simulator import simulate

HERE = Path(__file__).resolve().parent


def make(case: Case, solver: str, knobs: Knobs, budget_seconds: float) -> Made:
    """Plan a case with one solver, and play the plan."""
    asked = problem(case, knobs)
    try:
        plan = solve(asked, solver, budget_seconds, knobs.seed)
    except InfeasibleError as error:
        print(f"{case.scenario} {case.model} {case.algorithm} {case.mode} {solver}: {error}", file=sys.stderr)
        return Made(case, solver, None, None)
    played = simulate(plan, asked.model, knobs.seed)
    return Made(case, solver, plan, played.iteration_seconds)


def record(made: Made) -> dict[str, object]:
    """Return what the result keeps of a plan."""
    case, plan = made.case, made.plan
    return {
        "scenario": case.scenario,
        "model": case.model,
        "algorithm": case.algorithm,
        "mode": case.mode,
        **case.setting.model_dump(),
        "solver": made.solver,
        "predicted_seconds": made.seconds,
        "simulated_seconds": made.simulated_seconds,
        "planning_seconds": plan.solver.seconds if plan else None,
        "compared": plan.solver.evaluations if plan else None,
        "tasks": dict(plan.predicted.tasks) if plan else None,
    }


def shown(made: Made) -> str:
    """Return the line that tells how far the benchmark is."""
    case, plan = made.case, "none"
    if made.seconds is not None:
        plan = f"{made.seconds:.1f} s, simulated {made.simulated_seconds:.1f} s"
    return f"{case.scenario} {case.model} {case.algorithm} {case.mode} {made.solver}: {plan}"


def main() -> None:
    """Run all, write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--full", action="store_true", help="all models and the sensitivity (also: FULL=1)")
    parser.add_argument("--scenario", action="append", help="only this one (may be repeated); nothing is written")
    parser.add_argument("--budget", type=float, help="seconds for every solver; nothing is written")
    parser.add_argument("--jobs", type=int, default=1, help="plans made at the same time, each on a core of its own")
    if os.environ.get("FULL") == "1" and "--full" not in sys.argv:
        sys.argv.append("--full")  # so that the result names the whole command
    arguments = parser.parse_args()
    knobs = read_yaml(HERE / "paper.yaml", Knobs)
    paper = yaml.safe_load((HERE / "data" / "paper_results.yaml").read_text())
    asked = [
        (case, solver, knobs, arguments.budget or knobs.budget_seconds[solver])
        for case in cases(knobs, arguments.full)
        if not arguments.scenario or case.scenario in arguments.scenario
        for solver in (knobs.planner, *knobs.rivals[case.mode])
    ]
    plans: dict[tuple[Case, str], Made] = {}
    with ProcessPoolExecutor(arguments.jobs) as pool:
        for made in pool.map(make, *zip(*asked, strict=True)):
            plans[made.case, made.solver] = made
            print(shown(made), file=sys.stderr, flush=True)
    table, figures = page(Outcome(knobs, paper["ratios"], plans, arguments.full))
    if not (arguments.scenario or arguments.budget):
        name = "paper" if arguments.full else "paper-sample"
        kept = [record(made) for made in plans.values()]
        write_result(name, {"seed": knobs.seed, "knobs": knobs.model_dump(), **figures, "plans": kept}, table)
    print(table)


if __name__ == "__main__":
    main()
