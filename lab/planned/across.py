"""Plans whose training spans sites, over the small machine of `random_plans`: generation and reference stand apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hetrl.cost.memory import with_server
from hetrl.plan.plan import Plan, Replica, Stage, TaskPlan
from hetrl.problem import Problem
from hetrl.search.assemble import Made, plan_of
from hetrl.workload import ACTOR_GENERATION, ACTOR_TRAINING, REFERENCE_INFERENCE
from lab.planned.random_plans import LAYERS, SAMPLES

# Each replica: its share of the samples, and of each stage the device, counted through the sites, and the layers.
Grid = Sequence[tuple[int, Sequence[tuple[int, tuple[int, int]]]]]
ALPHA, BETA, GAMMA = 0, 2, 4
TRAININGS_ACROSS: Mapping[str, Grid] = {
    "data": ((40, ((ALPHA, (0, LAYERS)),)), (24, ((BETA, (0, LAYERS)),))),
    "pipeline": ((SAMPLES, ((ALPHA, (0, 1)), (BETA, (1, LAYERS)))),),
    "both": (
        (40, ((ALPHA, (0, 2)), (BETA, (2, LAYERS)))),
        (24, ((ALPHA + 1, (0, 2)), (BETA + 1, (2, LAYERS)))),
    ),
    "three": tuple((share, ((first, (0, LAYERS)),)) for share, first in ((24, ALPHA), (20, BETA), (20, GAMMA))),
}


def plan_across(problem: Problem, name: str, sharding: str = "none") -> Plan:
    """Return the plan whose actor training is `TRAININGS_ACROSS[name]`; the last device does everything else."""
    devices = [device.id for device in problem.topology.devices]
    replicas = tuple(
        Replica(share, tuple(Stage((devices[number],), layers) for number, layers in stages))
        for share, stages in TRAININGS_ACROSS[name]
    )
    alone = Replica(SAMPLES, (Stage((devices[-1],), (0, LAYERS)),))
    others = {
        ACTOR_GENERATION: TaskPlan("vllm", (with_server(alone, 0.05, SAMPLES, problem.model),)),
        REFERENCE_INFERENCE: TaskPlan("megatron", (alone,), micro_batch=4),
    }
    training = TaskPlan("megatron", replicas, micro_batch=2, optimizer_sharding=sharding)
    return plan_of(problem, [{ACTOR_TRAINING: training}, others], Made("across", 0, {}))
