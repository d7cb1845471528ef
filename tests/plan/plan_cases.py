"""One legal plan over three sites, for the tests of plans, constraints and reports."""

from __future__ import annotations

from hetrl.hardware import Link, Node, Site, Topology
from hetrl.plan.plan import Algorithm, Group, Plan, Predicted, Replica, Route, Solver, Stage, TaskPlan, WeightSync
from hetrl.workload import Lengths, Workload, architecture

A, B = "alps/a100-0", "alps/a100-1"
FIRST, SECOND = (f"{A}/0", f"{A}/1"), (f"{A}/2", f"{A}/3")
OTHER_FIRST, OTHER_SECOND = (f"{B}/0", f"{B}/1"), (f"{B}/2", f"{B}/3")


def topology() -> Topology:
    """Two nodes of four A100 at alps, two nodes of two L40S at jsc, one L4 at lab."""
    alps = Site("alps", tuple(Node(f"a100-{index}", "a100-40gb", 4) for index in range(2)))
    jsc = Site("jsc", tuple(Node(f"l40s-{index}", "l40s", 2) for index in range(2)))
    lab = Site("lab", (Node("l4-0", "l4", 1),))
    links = (Link(("alps", "jsc"), 12.5, 5.0), Link(("alps", "lab"), 40.0, 0.9), Link(("jsc", "lab"), 30.0, 1.0))
    return Topology((alps, jsc, lab), links)


def workload() -> Workload:
    """GRPO on Qwen3 1.7B (28 layers, 16 heads) with a reference and a reward model."""
    actor = architecture("qwen3-1.7b")
    return Workload(
        algorithm="grpo",
        mode="async",
        max_staleness=2,
        samples=64,
        samples_per_prompt=8,
        prompt_tokens=256,
        response=Lengths(512, 512),
        optimizer_steps_per_iteration=4,
        actor=actor,
        reference=actor,
        reward=actor,
    )


ROLLOUTS = (("jsc/l40s-0/0", 24, 30.5), ("jsc/l40s-0/1", 24, 30.5), ("lab/l4-0/0", 16, 9.5))
TRAINERS = (*FIRST, *SECOND, *OTHER_FIRST, *OTHER_SECOND)


def plan() -> Plan:
    """Training and reference on alps, rollouts at jsc and lab, the reward model at jsc."""
    return Plan(
        algorithm=Algorithm("grpo", "async", 2, 4),
        groups=(
            Group(("actor_training", "reference_inference"), TRAINERS),
            Group(("actor_generation",), tuple(device for device, *_ in ROLLOUTS), "array"),
            Group(("reward_inference",), ("jsc/l40s-1/0", "jsc/l40s-1/1")),
        ),
        tasks=_tasks(),
        weight_sync=WeightSync("delta", (Route("alps", "jsc", 8), Route("alps", "lab"))),
        site_order=("alps", "jsc", "lab"),
        predicted=_predicted(),
        solver=Solver("sha-ea", seed=0, seconds=8.1, evaluations=120_000),
        inputs={"experiment": "sha256:01", "topology": "sha256:02"},
    )


def _tasks() -> dict[str, TaskPlan]:
    halves = ((0, 14), (14, 28))
    training = TaskPlan(
        engine="megatron",
        micro_batch=2,
        recompute="full",
        optimizer_sharding="data_parallel",
        replicas=(
            Replica(40, (Stage(FIRST, halves[0]), Stage(SECOND, halves[1]))),
            Replica(24, (Stage(OTHER_FIRST, halves[0]), Stage(OTHER_SECOND, halves[1]))),
        ),
    )
    generation = TaskPlan(
        engine="vllm",
        replicas=tuple(
            Replica(samples, (Stage((device,), (0, 28)),), kv_cache_gb, 64) for device, samples, kv_cache_gb in ROLLOUTS
        ),
    )
    reference = TaskPlan(
        "megatron",
        (Replica(32, (Stage(FIRST, (0, 28)),)), Replica(32, (Stage(OTHER_FIRST, (0, 28)),))),
        idle_state="offload",
    )
    reward = TaskPlan("megatron", (Replica(64, (Stage(("jsc/l40s-1/0",), (0, 28)),)),))
    return {
        "actor_generation": generation,
        "reference_inference": reference,
        "reward_inference": reward,
        "actor_training": training,
    }


def _predicted() -> Predicted:
    return Predicted(
        iteration_seconds=41.25,
        samples_per_second=1.5515,
        tasks={
            "actor_generation": 33.0,
            "reference_inference": 2.5,
            "reward_inference": 3.75,
            "actor_training": 21.0,
            "weight_sync": 0.5,
        },
        peak_memory_gb={
            **dict.fromkeys(TRAINERS, 21.5),
            **dict.fromkeys(("jsc/l40s-0/0", "jsc/l40s-0/1"), 35.0),
            **dict.fromkeys(("jsc/l40s-1/0", "lab/l4-0/0"), 14.0),
        },
        wan_gb_per_iteration={"alps-jsc": 3.6, "alps-lab": 3.5},
    )
