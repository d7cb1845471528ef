"""Compile what the solvers need before anyone waits for a plan: `python -m hetrl.search.precompile`."""

from __future__ import annotations

from hetrl.hardware import Node, Site, Topology
from hetrl.lengths import Lengths
from hetrl.search import Problem, solve
from hetrl.workload import Workload, architecture

LONG_ENOUGH_SECONDS = 3600.0  # the program's budget counts while its functions compile


def main() -> None:
    """Plan a job that is as small as can be with every solver that compiles; what is compiled already is only read."""
    model = architecture("qwen3-1.7b")
    job = Workload(
        algorithm="grpo",
        mode="sync",
        max_staleness=0,
        samples=8,
        samples_per_prompt=4,
        prompt_tokens=128,
        response=Lengths(128, 128),
        optimizer_steps_per_iteration=1,
        actor=model,
        reference=model,
    )
    topology = Topology((Site("here", (Node("node-0", "a100-80gb", 2),)),), ())
    for solver in ("sha-ea", "ilp"):
        solve(Problem(topology, job), solver, LONG_ENOUGH_SECONDS, 0, evaluations=50)


if __name__ == "__main__":
    main()
