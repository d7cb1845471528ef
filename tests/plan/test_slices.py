"""Slices of GPUs (MIG) work alone: in no replica and in no training is there another device beside one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hetrl.hardware import Topology
from hetrl.plan.check import violations
from hetrl.plan.plan import Plan, Replica, Stage
from tests.plan.plan_cases import FIRST, SECOND, plan, topology, workload
from tests.plan.plan_changes import Change, both, group, task

TRAINING, GENERATION = "actor_training", "actor_generation"
REFERENCE, REWARD = "reference_inference", "reward_inference"
SLICE = "a100-80gb-3g.40gb"
WHOLE = (0, 28)


def sliced(*names: str) -> Topology:
    """The topology of the plan with slices in the nodes of these names."""
    sites = tuple(
        replace(site, nodes=tuple(replace(node, gpu=SLICE) if node.name in names else node for node in site.nodes))
        for site in topology().sites
    )
    return Topology(sites, topology().links)


def test_rollouts_and_inferences_run_on_one_slice_each() -> None:
    assert violations(plan(), sliced("l40s-0", "l40s-1", "l4-0"), workload()) == []


def server(*stages: tuple[str, ...]) -> Change:
    """One server of generation: its stages, layers split evenly."""
    spans = [(28 * index // len(stages), 28 * (index + 1) // len(stages)) for index in range(len(stages))]
    placed = tuple(Stage(devices, span) for devices, span in zip(stages, spans, strict=True))
    devices = tuple(device for stage in stages for device in stage)

    def change(p: Plan) -> Plan:
        routes = tuple(route for route in p.weight_sync.routes if route.target == "jsc")
        p = replace(p, weight_sync=replace(p.weight_sync, routes=routes), site_order=("alps", "jsc"))
        p = task(GENERATION, replicas=(Replica(64, placed, 1.0, 8),))(p)
        return group(1, devices=devices)(p)

    return change


@pytest.mark.parametrize(
    "stages", [(("jsc/l40s-0/0", "jsc/l40s-0/1"),), (("jsc/l40s-0/0",), ("jsc/l40s-0/1",))], ids=["TP", "PP"]
)
def test_a_server_of_two_slices_is_refused(stages: tuple[tuple[str, ...], ...]) -> None:
    changed = server(*stages)(plan())
    assert violations(changed, topology(), workload()) == []
    (line,) = violations(changed, sliced("l40s-0"), workload())
    assert line == (
        f"{GENERATION}, replica 0: has 2 devices, and jsc/l40s-0/0 is a slice of a GPU (a100-80gb), which works alone; "
        "take whole GPUs, or one slice and nothing else"
    )


def test_an_inference_with_a_slice_beside_a_whole_gpu_is_refused() -> None:
    stages = (Stage((FIRST[0],), (0, 14)), Stage(("alps/a100-1/0",), (14, 28)))
    changed = task(REFERENCE, replicas=(Replica(64, stages),))(plan())
    assert violations(changed, topology(), workload()) == []
    found = violations(changed, sliced("a100-1"), workload())
    assert [line for line in found if line.startswith(REFERENCE)] == [
        f"{REFERENCE}, replica 0: has 2 devices, and alps/a100-1/0 is a slice of a GPU (a100-80gb), which works alone; "
        "take whole GPUs, or one slice and nothing else"
    ]


def test_a_training_has_no_slice_among_its_devices() -> None:
    """Not even where each replica is a slice: replicas reduce their gradients together."""
    alone = tuple(Replica(32, (Stage((device,), WHOLE),)) for device in (FIRST[0], "alps/a100-1/0"))
    changed = both(task(TRAINING, replicas=alone), task(REFERENCE, replicas=(Replica(64, (Stage(FIRST, WHOLE),)),)))
    assert violations(changed(plan()), topology(), workload()) == []
    (line,) = violations(changed(plan()), sliced("a100-1"), workload())
    assert line.startswith(f"{TRAINING}: has 2 devices, and alps/a100-1/0 is a slice of a GPU (a100-80gb)")


def test_a_training_may_have_one_slice_to_itself() -> None:
    one = (Stage((FIRST[0],), WHOLE),)
    changed = both(
        task(TRAINING, replicas=(Replica(64, one),), optimizer_sharding="none"),
        task(REFERENCE, replicas=(Replica(64, (Stage((SECOND[0],), WHOLE),)),)),
    )(plan())
    assert violations(changed, sliced("a100-0"), workload()) == []


def test_several_replicas_of_one_slice_each_are_legal() -> None:
    two = tuple(Replica(32, (Stage((device,), WHOLE),)) for device in ("jsc/l40s-1/0", "jsc/l40s-1/1"))
    assert violations(task(REWARD, replicas=two)(plan()), sliced("l40s-0", "l40s-1"), workload()) == []
