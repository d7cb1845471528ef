"""Compare searches where evaluations are dear: the best plan after 5,000 to 1,000,000 of them.

for each case, search and number of evaluations: a search of its own with that bound, with so many seeds each
the page tells the medians over the seeds, beside the best of all; all are predicted by our model
"""

from __future__ import annotations

import argparse
from math import inf
from multiprocessing import Pool
from statistics import median

from _paper_cases import ASYNC, SYNC, Case, Knobs, problem
from _results import ROOT, write_result
from _rival_searches import anneal, ga, mcmc

from hetrl.describe.yaml_file import read_yaml
from hetrl.search import sha_ea
from hetrl.search.baselines import deap_ea
from hetrl.search.evaluate import Evaluator
from hetrl.search.limits import Limits, Search
from hetrl.search.space import Space

SCENARIO, MODEL = "multi-continent", "qwen3-8b"
CASES = {"ppo sync": ("ppo", SYNC), "grpo async": ("grpo", ASYNC)}
BOUNDS = (5_000, 20_000, 50_000, 200_000, 1_000_000)
SEARCHES: dict[str, Search] = {
    "sha-ea": sha_ea.search,
    "anneal": anneal,
    "mcmc": mcmc,
    "ga": ga,
    "deap": deap_ea.search,
}
Asked = tuple[str, str, int, int]  # case, search, evaluations, seed


def run(asked: Asked) -> float:
    """Return the seconds of an iteration of the best plan that a search finds."""
    case, search, evaluations, seed = asked
    knobs = read_yaml(ROOT / "benchmarks" / "paper.yaml", Knobs)
    evaluator = Evaluator(Space(problem(Case(SCENARIO, MODEL, *CASES[case], knobs.setting), knobs)))
    return SEARCHES[search](evaluator, Limits(inf, evaluations), seed, None).seconds


def page(found: dict[Asked, float], seeds: int) -> str:
    """Return the benchmark's part of the page."""
    lines = [
        f"Seconds of an iteration of the best plan after so many evaluations, medians of {seeds} seeds (least to "
        f"most), as predicted by our model; {SCENARIO}, {MODEL}. anneal, mcmc and ga have sha-ea's evaluator and "
        "changes, deap its evaluator.",
        "",
    ]
    for case in CASES:
        known = min(value for asked, value in found.items() if asked[0] == case)
        lines += [f"{case} (least of all: {known:.1f} s)", ""]
        lines += [
            "| search | " + " | ".join(f"{bound:,}" for bound in BOUNDS) + " |",
            "| --- |" + " --- |" * len(BOUNDS),
        ]
        for search in SEARCHES:
            cells = []
            for bound in BOUNDS:
                values = [found[case, search, bound, seed] for seed in range(seeds)]
                cells.append(f"{median(values):.1f} ({min(values):.1f} to {max(values):.1f})")
            lines.append(f"| {search} | " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    """Run all, write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seeds", type=int, default=5)
    seeds = parser.parse_args().seeds
    asked = [(c, s, n, seed) for c in CASES for s in SEARCHES for n in BOUNDS for seed in range(seeds)]
    with Pool() as pool:
        found = dict(zip(asked, pool.map(run, asked, chunksize=1), strict=True))
    table = page(found, seeds)
    runs = [{"case": c, "search": s, "evaluations": n, "seed": k, "seconds": v} for (c, s, n, k), v in found.items()]
    write_result("evaluations", {"seed": 0, "seeds": seeds, "runs": runs}, table)
    print(table)


if __name__ == "__main__":
    main()
