"""The plan and the cost model that the tests of emulated engines share."""

from __future__ import annotations

from hetrl.cost.model import CostModel
from tests.plan import plan_cases

MODEL = CostModel(plan_cases.topology(), plan_cases.workload())
PLAN = plan_cases.plan()
