"""The plans, the cost models and the clock that the tests of emulated engines share."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from hetrl.cost.model import CostModel
from hetrl.cost.weight_sync import weight_routes
from hetrl.plan.plan import Plan, Replica, Stage, TaskPlan
from hetrl.workload import architecture
from tests.plan import plan_cases

MODEL = CostModel(plan_cases.topology(), plan_cases.workload())
PLAN = plan_cases.plan()


class Jumping(asyncio.SelectorEventLoop):
    """An event loop in which nothing takes time but what waits, and that at once."""

    _now = 0.0

    def time(self) -> float:
        return self._now

    def _run_once(self) -> None:
        if not self._ready and self._scheduled:
            self._now = max(self._now, self._scheduled[0]._when)
        super()._run_once()


def with_critic(mode: str) -> tuple[Plan, CostModel]:
    """Return a plan whose critic takes the actor's way between two sites, and its cost model."""
    critic = {
        "critic_training": TaskPlan("megatron", (Replica(64, (Stage(plan_cases.FIRST, (0, 28)),)),)),
        "critic_inference": TaskPlan("megatron", (Replica(64, (Stage(("jsc/l40s-1/0",), (0, 28)),)),)),
    }
    workload = replace(MODEL.workload, algorithm="ppo", critic=architecture("qwen3-0.6b"), mode=mode, max_staleness=1)
    tasks = PLAN.tasks | critic
    return replace(PLAN, tasks=tasks, weight_sync=weight_routes(tasks)), replace(MODEL, workload=workload)
