"""One training whose pipeline lies over two sites that reach each other, and the third, through a relay only."""

from __future__ import annotations

import json
from pathlib import Path

from hetrl.cost.memory import with_server
from hetrl.plan.plan import Plan, Replica, Stage, TaskPlan
from hetrl.problem import Problem, read_problem
from hetrl.search.assemble import Made, plan_of
from hetrl.workload import ACTOR_GENERATION, ACTOR_TRAINING
from lab.lab import Lab
from lab.quickstart import over_lab, over_relay, relay_at
from tests.runs import submit

STEPS = 2


def pipeline_over_two_sites(problem: Problem) -> Plan:
    """Return the plan with a stage of the training at each of the first two sites, and generation at the third."""
    first, second, third = (device.id for device in problem.topology.devices)
    samples, layers = problem.workload.samples, problem.workload.actor.layers
    stages = (Stage((first,), (0, layers // 2)), Stage((second,), (layers // 2, layers)))
    server = with_server(Replica(samples, (Stage((third,), (0, layers)),)), 0.05, samples, problem.model)
    training = TaskPlan("megatron", (Replica(samples, stages),), micro_batch=samples // 8)
    return plan_of(
        problem,
        [{ACTOR_TRAINING: training}, {ACTOR_GENERATION: TaskPlan("vllm", (server,))}],
        Made("across", 0, {}),
    )


def test_a_pipeline_over_two_sites_trains_through_a_relay_only(lab: Lab, tmp_path: Path) -> None:
    with relay_at(lab, "alpha") as relay:
        ways = over_relay(relay, tmp_path)
        ways["beta"]["engines"] = ["megatron"]
        config = over_lab(lab, tmp_path, ways, steps=STEPS)
        plan = tmp_path / "plan.json"
        plan.write_text(json.dumps(pipeline_over_two_sites(read_problem(config)).to_json()))
        before = lab.stats()
        run = submit(config, tmp_path, "--plan", str(plan), "--yes")
    assert run.code == 0, run.stderr
    rows = run.rows()
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert all(0.1 < row["reward"] < 1 and row["grad_norm"] > 0 for row in rows)
    crossed = {pair: traffic.bytes - before[pair].bytes for pair, traffic in lab.stats().items()}
    assert min(crossed["alpha", "beta"], crossed["beta", "alpha"]) > 1_000_000, "activations go, gradients come back"
