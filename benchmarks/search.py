"""Compare searches on the paper's 64 GPUs: the best plan against wall time, on one core.

for each case: verl's plan; random, deap, ilp and sha-ea for so many seconds with so many seeds each
gap: iteration / that of the best plan known (benchmarks/data/best_known.json) - 1, both predicted by our model

Compilation is measured apart, in a fresh copy of the sources. Without FULL=1 (or --full) one case runs, some minutes;
with it, all cases, 8 seeds of 30 minutes. --best-known does the same and keeps the plans that beat the best known.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from math import inf
from pathlib import Path
from statistics import median

from _paper_cases import ASYNC, SYNC, Case, Knobs, problem
from _plot import Line, plot
from _results import ROOT, command, write_result
from _search_runs import (
    SEARCHES,
    Known,
    Run,
    best_known,
    best_of,
    finite,
    keep,
    record,
    run_ilp,
    run_search,
    run_verl,
    use_one_core,
    warm_up,
)

from hetrl.describe.yaml_file import read_yaml
from hetrl.search import Problem

PICTURES = ROOT / "docs" / "images"
SCENARIO, MODEL = "multi-continent", "qwen3-8b"
CASES = (("ppo", SYNC), ("grpo", ASYNC), ("ppo", ASYNC), ("grpo", SYNC))
SOLVERS = {"verl": "#d55e00", "random": "#e69f00", "deap": "#cc79a7", "ilp": "#009e73", "sha-ea": "#0072b2"}
Effort = tuple[float, int]  # seconds of each search, seeds
SHORT: dict[str, Effort] = {
    "verl": (60.0, 1),
    "random": (5.0, 1),
    "deap": (200.0, 1),
    "ilp": (15.0, 1),
    "sha-ea": (10.0, 8),
}
LONG: dict[str, Effort] = {**SHORT, **dict.fromkeys(SEARCHES, (1800.0, 8)), "ilp": (600.0, 1)}
AT_SECONDS = 10.0
GOAL_GAP, GOAL_LONGER, GOAL_RATE = 0.01, 20.0, 100_000


@dataclass(frozen=True)
class Outcome:
    """All runs of a case, the best plan known, these runs included, and the best one known before."""

    name: str
    runs: tuple[Run, ...]
    known: Known
    before: Known | None

    def of(self, solver: str) -> list[Run]:
        """Return the runs of a solver."""
        return [run for run in self.runs if run.solver == solver]

    def gap(self, iteration_seconds: float) -> float:
        """Return by what share an iteration is longer than that of the best plan known."""
        return iteration_seconds / self.known.iteration_seconds - 1


def run_case(algorithm: str, mode: str, asked: Problem, efforts: dict[str, Effort]) -> Outcome:
    """Let every solver search, one after the other."""
    name, runs = f"{SCENARIO} {MODEL} {algorithm} {mode}", list[Run]()
    for solver, (seconds, seeds) in efforts.items():
        for seed in range(seeds):
            if solver in SEARCHES:
                runs.append(run_search(solver, asked, seconds, seed))
            else:
                runs.append((run_verl if solver == "verl" else run_ilp)(asked, seconds, seed))
            print(f"{name}: {solver}, seed {seed}: {runs[-1].best:.2f} s", file=sys.stderr, flush=True)
    before = best_known(name, asked)
    known = best_of(before, runs, command())
    if known is None:
        sys.exit(f"{name}: no search found a plan; give them more time with --seconds")
    return Outcome(name, tuple(runs), known, before)


def compile_seconds() -> float:
    """Return how long a fresh copy of the sources takes to compile the search, imports included."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(ROOT / "hetrl", Path(folder) / "hetrl", ignore=shutil.ignore_patterns("__pycache__"))
        began = time.monotonic()
        alone = {**os.environ, "XDG_CACHE_HOME": folder}
        subprocess.run([sys.executable, "-m", "hetrl.search.core.precompile"], cwd=folder, env=alone, check=True)
        return time.monotonic() - began


# --- the page ---------------------------------------------------------------------------------------------------------


def figures(outcome: Outcome) -> dict[str, float]:
    """Return the figures to reach; infinite: sha-ea had no plan by then, or deap never came that far."""
    own, deap = outcome.of("sha-ea"), outcome.of("deap")
    after_ten = median(run.value_at(AT_SECONDS) for run in own)
    reached = min(run.reached(after_ten) for run in deap)
    compared = max(run.evaluations for run in deap)
    return {
        "gap": outcome.gap(after_ten),
        "worst_gap": outcome.gap(max(run.value_at(AT_SECONDS) for run in own)),
        "deap_longer": reached / AT_SECONDS,
        "deap_seconds": max(run.wall_seconds for run in deap),
        "deap_gap": outcome.gap(min(run.best for run in deap)),
        "evaluations_of_deap": compared,
        "gap_after_evaluations_of_deap": outcome.gap(median(run.value_after(compared) for run in own)),
        "evaluations_per_second": sum(run.evaluations for run in own) / sum(run.wall_seconds for run in own),
    }


def page(outcomes: list[Outcome], compiled: float) -> str:
    """Return the benchmark's part of the page."""
    lines = [
        f"The best plan against wall time on one core, {MODEL} on the paper's 64 GPUs in eight regions "
        f"({SCENARIO}), knobs as in `benchmarks/paper.yaml`. Seconds of an iteration, predicted by our model; medians "
        f"over seeds. Compilation of the searches, once per machine and not counted: {compiled:.0f} s. A search starts "
        "with the tables of the problem and no plan met. ilp searches a smaller space (docs/ilp.md) and answers at its "
        "end.",
    ]
    for outcome in outcomes:
        lines += ["", f"**{outcome.name}**", "", *_sentences(outcome), "", *_table(outcome), ""]
        lines += [f"![Best plan against wall time, {outcome.name}](images/{_picture(outcome).name})"]
    return "\n".join(lines)


def _sentences(outcome: Outcome) -> list[str]:
    found, known = figures(outcome), outcome.known
    deap = f"takes {found['deap_longer']:.1f} times as long"
    if found["deap_longer"] == inf:
        deap = f"never comes there in {found['deap_seconds']:.0f} s (gap {_percent(found['deap_gap'])})"
    source = f"`{known.command}`" if outcome.before is known else "this run"
    return [
        f"Best known: {known.iteration_seconds:.2f} s, {known.solver} with seed {known.seed} after "
        f"{known.wall_seconds:g} s ({source}). After {AT_SECONDS:g} s sha-ea is within {_percent(found['gap'])} of it "
        f"(to reach: {GOAL_GAP:.0%}), within {_percent(found['worst_gap'])} with every seed. "
        f"To a plan as good deap {deap} (to reach: {GOAL_LONGER:g} times, or never). After the "
        f"{found['evaluations_of_deap']:,} plans that deap valued, sha-ea is within "
        f"{_percent(found['gap_after_evaluations_of_deap'])}. "
        f"sha-ea values {found['evaluations_per_second']:,.0f} plans per second (to reach: {GOAL_RATE:,})."
    ]


def _table(outcome: Outcome) -> list[str]:
    lines = [
        f"| solver | seeds | after 1 s | after {AT_SECONDS:g} s | at the end | gap | took | plans per second |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for solver in SOLVERS:
        runs = outcome.of(solver)
        end, took = median(run.best for run in runs), median(run.wall_seconds for run in runs)
        rate = sum(run.evaluations for run in runs) / sum(run.wall_seconds for run in runs)
        at = [_shown(median(run.value_at(seconds) for run in runs)) for seconds in (1.0, AT_SECONDS, inf)]
        at += [_percent(outcome.gap(end)), f"{took:.0f} s", f"{rate:,.0f}"]
        lines.append(f"| {solver} | {len(runs)} | {' | '.join(at)} |")
    return lines


def _shown(iteration_seconds: float) -> str:
    return "-" if iteration_seconds == inf else f"{iteration_seconds:.2f} s"


def _percent(share: float) -> str:
    return "-" if share == inf else f"{share:.1%}"


def _picture(outcome: Outcome) -> Path:
    return PICTURES / f"search-{outcome.name.split(MODEL)[-1].strip().replace(' ', '-')}.svg"


def picture(outcome: Outcome) -> str:
    """Return the plot: the iteration over that of the best plan known."""
    end, lines = max(run.wall_seconds for run in outcome.runs), []
    for run in outcome.runs:
        points = [(one.wall_seconds, one.iteration_seconds / outcome.known.iteration_seconds) for one in run.points]
        once = run.solver in ("verl", "ilp")  # an answer at its end, which stays
        points += [(end if once else run.wall_seconds, points[-1][1])] if points else []
        lines.append(Line(run.solver, SOLVERS[run.solver], points, steps=True, dashed=once))
    return plot(
        f"Iteration over that of the best plan known ({outcome.name})", "seconds of search, one core", lines[::-1]
    )


# --- the run ----------------------------------------------------------------------------------------------------------


def _asked() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--full", action="store_true", help="all cases, 8 seeds of 30 minutes (also: FULL=1)")
    parser.add_argument("--best-known", action="store_true", help="as --full, and keep plans that beat the best known")
    parser.add_argument("--case", action="append", help='only this one, as "ppo sync" (may be repeated)')
    parser.add_argument("--solver", action="append", choices=SOLVERS, help="only this one; no result is written")
    parser.add_argument("--seconds", type=float, help="of every search")
    parser.add_argument("--seeds", type=int, help="of every search")
    if os.environ.get("FULL") == "1" and not {"--full", "--best-known"} & set(sys.argv):
        sys.argv.append("--full")  # so that the result names the whole command
    return parser.parse_args()


def _efforts(arguments: argparse.Namespace) -> dict[str, Effort]:
    efforts = dict(LONG if arguments.full or arguments.best_known else SHORT)
    for solver in SEARCHES:
        seconds, seeds = efforts[solver]
        efforts[solver] = arguments.seconds or seconds, arguments.seeds or seeds
    return {solver: own for solver, own in efforts.items() if not arguments.solver or solver in arguments.solver}


def main() -> None:
    """Run all, write the result and the pictures."""
    arguments, knobs = _asked(), read_yaml(ROOT / "benchmarks" / "paper.yaml", Knobs)
    cases: tuple[tuple[str, str], ...] = CASES if arguments.full or arguments.best_known else CASES[:1]
    cases = tuple(case for case in CASES if " ".join(case) in arguments.case) if arguments.case else cases
    asked = {case: problem(Case(SCENARIO, MODEL, *case, knobs.setting), knobs) for case in cases}
    compiled = compile_seconds()
    use_one_core()
    warm_up(asked[cases[0]])
    outcomes = [run_case(*case, asked[case], _efforts(arguments)) for case in cases]
    for outcome in outcomes:
        if arguments.best_known and outcome.known is not outcome.before:
            keep(outcome.name, outcome.known)
    if arguments.solver:
        return
    PICTURES.mkdir(exist_ok=True)
    for outcome in outcomes:
        _picture(outcome).write_text(picture(outcome))
    table = page(outcomes, compiled)
    kept = [
        {"case": one.name, "best_known": asdict(one.known), **finite(figures(one)), "runs": list(map(record, one.runs))}
        for one in outcomes
    ]
    write_result("search", {"compile_seconds": compiled, "cases": kept}, table)
    print(table)


if __name__ == "__main__":
    main()
