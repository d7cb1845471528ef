"""Prove plans optimal, or bound how far from it they are: the integer program on small topologies.

For each case: sha-ea in the same plan space for two seconds, then the integer program from its own sha-ea's plan until
the limit. Values are predicted by our model: by the full one, and composed from the program's constants.

The cases up to 24 GPUs have a minute each at most, those of 64 GPUs (--large) ten; with FULL=1 (or --full) both run,
and the small ones have five.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from dataclasses import asdict, dataclass
from itertools import product

from _results import ROOT, write_result

from hetrl.describe.sites import read_scenario, topology_of
from hetrl.lengths import Lengths
from hetrl.search import Problem
from hetrl.search.evaluate import Evaluator
from hetrl.search.ilp.solver import EXACT, START_SHARE, best_in_space
from hetrl.search.limits import Limits
from hetrl.search.sha_ea import search
from hetrl.search.space import Space
from hetrl.workload import Workload, architecture

SHA_EA_SECONDS = 2.0
SEED = 0
SMALL = (
    *((name, kind) for name in ("small-8", "small-12", "small-16", "small-24") for kind in ("ppo", "grpo")),
    ("small-20-five-classes", "grpo"),
)
SMALL_SECONDS, FULL_SECONDS = 60.0, 300.0
LARGE = (("single-region", "ppo"), ("multi-region-hybrid", "grpo"), ("multi-continent", "grpo"))
LARGE_SECONDS = 600.0


@dataclass(frozen=True)
class Proof:
    """What came of one case; seconds of an iteration unless the name says otherwise."""

    scenario: str
    algorithm: str
    mode: str
    gpus: int
    classes: int
    columns: int
    sha_ea_seconds: float
    ilp_seconds: float
    composed_seconds: float
    bound_seconds: float
    proven: bool
    wall_seconds: float

    @property
    def gap(self) -> float:
        """Return how far above the bound the plan is, by the full model."""
        return self.ilp_seconds / self.bound_seconds - 1 if self.bound_seconds > 0 else float("inf")


def workload(algorithm: str, mode: str) -> Workload:
    """Return the job: Qwen3-1.7B in all roles."""
    model = architecture("qwen3-1.7b")
    return Workload(
        algorithm=algorithm,
        mode=mode,
        max_staleness=2 if mode == "async" else 0,
        samples=256,
        samples_per_prompt=8,
        prompt_tokens=512,
        response=Lengths(512, 512),
        optimizer_steps_per_iteration=4,
        actor=model,
        critic=model if algorithm == "ppo" else None,
        reference=model,
        reward=model,
    )


def prove(scenario: str, algorithm: str, mode: str, limit_seconds: float) -> Proof:
    """Run one case."""
    topology = topology_of(read_scenario(ROOT / "topology" / "scenarios" / f"{scenario}.yaml"))
    space = Space(Problem(topology, workload(algorithm, mode)))
    quick = search(Evaluator(space, narrow=True), Limits(time.monotonic() + SHA_EA_SECONDS), SEED)
    evaluator, began = Evaluator(space, narrow=True), time.monotonic()
    start = search(evaluator, Limits(began + START_SHARE * limit_seconds), SEED)
    found = best_in_space(evaluator, start.x, start.seconds, began + limit_seconds)
    return Proof(
        scenario,
        algorithm,
        mode,
        sum(space.sizes),
        len(space.classes),
        found.columns,
        quick.seconds,
        found.seconds,
        found.composed,
        found.bound,
        found.proven,
        time.monotonic() - began,
    )


def page(proofs: list[Proof]) -> str:
    """Return the table of all cases."""
    lines = [
        "| scenario | job | GPUs (classes) | columns | sha-ea in 2 s | ilp, full model | ilp, constants | bound | gap "
        "| wall |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for one in proofs:
        composed = "-" if one.composed_seconds == float("inf") else f"{one.composed_seconds:.3f} s"
        gap = "proven" if one.proven and one.gap <= EXACT else f"{one.gap:.1%}" if one.bound_seconds else "no bound"
        lines.append(
            f"| {one.scenario} | {one.algorithm} {one.mode} | {one.gpus} ({one.classes}) | {one.columns} "
            f"| {one.sha_ea_seconds:.3f} s | {one.ilp_seconds:.3f} s | {composed} | {one.bound_seconds:.3f} s "
            f"| {gap} | {one.wall_seconds:.0f} s |"
        )
    proven = [one for one in proofs if one.proven and one.gap <= EXACT]
    near = sum(one.sha_ea_seconds <= one.ilp_seconds * 1.01 for one in proven)
    lines += [
        "",
        f"{len(proven)} of {len(proofs)} plans are proven optimal in their space; sha-ea in the same space is within "
        f"1 % of {near} of those in two seconds. Seconds of an iteration, predicted by our model; docs/ilp.md says "
        "what the constants leave out.",
    ]
    return "\n".join(lines)


def main() -> None:
    """Run the cases asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--full", action="store_true", help="all cases, an hour and more (also: FULL=1)")
    parser.add_argument("--large", action="store_true", help="those of 64 GPUs alone, an hour")
    parser.add_argument("--limit", type=float, help="seconds per case instead")
    if os.environ.get("FULL") == "1" and "--full" not in sys.argv:
        sys.argv.append("--full")  # so that the result names the whole command
    arguments = parser.parse_args()
    prove(*SMALL[0], "sync", 1.0)  # compiles, and is not counted
    if arguments.full or not arguments.large:
        run("ilp-small", SMALL, arguments.limit or (FULL_SECONDS if arguments.full else SMALL_SECONDS))
    if arguments.full or arguments.large:
        run("ilp-large", LARGE, arguments.limit or LARGE_SECONDS)


def run(name: str, cases: tuple[tuple[str, str], ...], limit_seconds: float) -> None:
    """Run some cases, synchronous and asynchronous; write their result."""
    proofs = []
    for (scenario, algorithm), mode in product(cases, ("sync", "async")):
        proofs.append(prove(scenario, algorithm, mode, limit_seconds))
        print(proofs[-1], file=sys.stderr, flush=True)
    kept = [{**asdict(one), "gap": one.gap} for one in proofs]
    for one in kept:  # JSON has no infinity
        one.update({key: None for key, value in one.items() if value == float("inf")})
    table = page(proofs)
    write_result(name, {"seed": SEED, "limit_seconds": limit_seconds, "cases": kept}, table)
    print(table)


if __name__ == "__main__":
    main()
