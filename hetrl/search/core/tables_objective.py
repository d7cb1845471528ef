"""Numbers of the objective per device class (c) and site (s), as the compiled core reads them."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from hetrl.cost.charges import has_prices
from hetrl.cost.formulas import HOUR
from hetrl.cost.objective import KINDS
from hetrl.search.core.records import Flags1, Floats1
from hetrl.search.space import Space


class ObjectiveTables(NamedTuple):
    """What plans are valued by; limits are infinite where there is none."""

    kind: int  # index into `hetrl.cost.objective.KINDS`
    max_iteration_seconds: float
    budget_per_hour: float
    steps: int
    walltime_seconds: float
    queue_timeout_seconds: float
    budget_gpu_hours: float
    price: Floats1  # [c] of a device and hour
    whole_nodes: Flags1  # [c] whether Slurm grants the nodes of the class as a whole
    start: Floats1  # [s] seconds until a job begins
    site_gpu_hours: Floats1  # [s] the most that a run may spend


def objective_tables(space: Space) -> ObjectiveTables:
    """Return the numbers of a problem's objective."""
    topology, objective = space.problem.topology, space.problem.objective
    firsts = [nodes[0][0] for nodes in space.nodes]
    prices = [topology.node_by_id[first.node_id].price_per_gpu_hour for first in firsts]
    budgets = [site.budget_gpu_hours for site in topology.sites]
    return ObjectiveTables(
        kind=KINDS.index(objective.kind),
        max_iteration_seconds=float(objective.max_iteration_seconds),
        budget_per_hour=float(objective.budget_per_hour),
        steps=objective.steps,
        walltime_seconds=float(objective.walltime_seconds),
        queue_timeout_seconds=float(objective.queue_timeout_seconds),
        budget_gpu_hours=float(objective.budget_gpu_hours),
        price=np.array(prices if has_prices(topology) else [1.0] * len(prices), np.float64),
        whole_nodes=np.array([topology.site_by_name[first.site].allocation == "node" for first in firsts]),
        start=np.array([site.queue_hours * HOUR for site in topology.sites]),
        site_gpu_hours=np.array([math.inf if budget is None else budget for budget in budgets], np.float64),
    )
