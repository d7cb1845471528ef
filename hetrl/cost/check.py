"""Every constraint on a plan: a plan that passes `check` can be submitted, and what it asks for fits.

Memory is added up here from the plan's parts; what the plan's file says under `predicted` counts for nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from hetrl.cost.memory import (
    Footprint,
    device_footprints,
    host_memory_gb,
    least_kv_cache_gb,
    peak_memory_gb,
    rollout_shapes,
)
from hetrl.cost.model import CostModel
from hetrl.plan import check as plan_check
from hetrl.plan.check import PlanError
from hetrl.plan.plan import Plan, node_of
from hetrl.workload import ACTOR_GENERATION

__all__ = ["PlanError", "check", "violations"]

_ROUNDING = 1 + 1e-9  # a cache that takes all that is left sums up to a little more or less than the whole


def check(plan: Plan, model: CostModel, *, relaxed: bool = False) -> None:
    """Raise PlanError if the plan cannot run this workload on this topology.

    `relaxed` lifts the training grid (one tensor-parallel degree and one layer split for all replicas) for study.
    """
    if found := violations(plan, model, relaxed=relaxed):
        raise PlanError(tuple(found))


def violations(plan: Plan, model: CostModel, *, relaxed: bool = False) -> list[str]:
    """Return one line per broken constraint: where, what, with ids; an empty list for a legal plan.

    Memory is added up once the plan is sound in itself (`hetrl.plan.check`).
    """
    found = plan_check.violations(plan, model.topology, model.workload, relaxed=relaxed)
    return found or [*_caches(plan, model), *_devices(plan, model), *_hosts(plan, model)]


def _caches(plan: Plan, model: CostModel) -> Iterator[str]:
    """Every server of generation starts: its cache holds a sequence of full length."""
    for index, replica in enumerate(plan.tasks[ACTOR_GENERATION].replicas):
        least = least_kv_cache_gb(rollout_shapes(replica, model), model.workload)
        if replica.kv_cache_gb < least:
            enough = math.ceil(least * 1e6) / 1e6
            yield (
                f"{ACTOR_GENERATION}, replica {index}: kv_cache_gb is {replica.kv_cache_gb:g}; a sequence of "
                f"{model.workload.max_sequence_tokens} tokens needs {enough:g} on each device"
            )


def _devices(plan: Plan, model: CostModel) -> Iterator[str]:
    """What all tasks keep on a device and what the largest needs while it runs are in its usable memory."""
    peaks, needs = peak_memory_gb(plan, model), device_footprints(plan, model)
    for device, peak in peaks.items():
        usable = model.rates(device).usable_gb
        if not peak <= usable * _ROUNDING:
            gpu = model.topology.node_by_id[node_of(device)].gpu_type
            limit = f"{usable:.2f} of {gpu.memory_gb:g} GB of {gpu.name}"
            yield f"{device}: needs {peak:.2f} GB; usable are {limit} ({_parts(needs[device])})"


def _parts(needs: Mapping[str, Footprint]) -> str:
    return ", ".join(
        f"{name} keeps {one.resident_gb:.2f} and needs {one.active_gb:.2f} while it runs" for name, one in needs.items()
    )


def _hosts(plan: Plan, model: CostModel) -> Iterator[str]:
    """What tasks offload is in the memory of the node."""
    for node, needed in host_memory_gb(plan, model).items():
        has = model.topology.node_by_id[node].host_memory_gb
        if not needed <= has * _ROUNDING:
            yield f"{node}: idle_state offload needs {needed:.2f} GB of host memory; the node has {has:g}"
