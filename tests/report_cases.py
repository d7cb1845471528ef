"""A run's summary, and a plan whose names are markup, for the tests of reports."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hetrl.hardware import Node, Site, Topology
from hetrl.plan import Plan, Replica, Stage
from tests.plan_cases import plan

HOSTILE = '<script>alert("1")</script>&[red]'

SUMMARY: dict[str, Any] = {
    "run": "try-20260102-030405",
    "name": "try",
    "steps": 3,
    "reward_first": 0.35,
    "reward_last": 0.55,
    "warm_start": {"steps": 35, "reward": 0.27},
    "samples_per_second": 21.3,
    "tokens_per_second": 43.1,
    "engines": {"megatron-core": "0.16.1", "vllm": "0.32.0"},
    "sites": ["alps", "jsc", "lab"],
    "tasks": {
        "actor_generation": {"predicted_seconds": 1.11, "measured_seconds": 1.31},
        "actor_training": {"predicted_seconds": 1.22, "measured_seconds": 0.92},
    },
    "weight_versions": [{"version": 1, "bytes": 1_234_567, "seconds": 0.1, "digest": "sha256:abcd"}],
    "batch_versions": [[1, {"0": 24, "1": 40}]],
    "bytes_per_link": {"alps-jsc": 123_456_789, "alps-lab": 52_345_678},
    "gpu_hours": {"alps": 0.1, "jsc": 0.02},
    "faults_survived": 1,
}


def hostile() -> tuple[Plan, Topology]:
    """Return a plan on one site with one node whose names are markup."""
    name = HOSTILE.replace("/", "|")
    device = f"{name}/{name}/0"
    base = plan()
    tasks = {
        key: replace(task, replicas=(Replica(64, (Stage((device,), (0, 28)),)),)) for key, task in base.tasks.items()
    }
    groups = (replace(base.groups[0], tasks=tuple(tasks), devices=(device,)),)
    predicted = replace(base.predicted, tasks={HOSTILE: 1.0}, wan_gb_per_iteration={HOSTILE: 1.0})
    changed = replace(
        base,
        tasks=tasks,
        groups=groups,
        predicted=predicted,
        site_order=(name,),
        solver=replace(base.solver, name=HOSTILE),
        inputs={HOSTILE: HOSTILE},
    )
    return changed, Topology((Site(name, (Node(name, "l4", 1),)),))
