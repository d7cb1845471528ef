"""What a mixed fleet gains over the best fleet of one GPU type, from the same offer and by the same planner.

for each offer (GPUs with prices), model and budget per hour
  equal budget:      the most throughput within it, of all types and of each type alone
  equal throughput:  the least price at what the best fleet of one type does there, of all types and of each type alone
each plan predicted by our model and played by our simulator

The offers and knobs are in `fleet.yaml`. A plan is the best of those of some seeds, and of those found before that keep
its bounds; searches end by their evaluations, so that the plans can be had again.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import product
from pathlib import Path

from _fleet_page import Bought, Cell, page
from _paper_cases import Batch
from _results import write_result

from hetrl.cost.charges import asked_for
from hetrl.cost.formulas import price_of
from hetrl.cost.objective import COST, Objective, plan_value
from hetrl.describe.sites import ScenarioFile, topology_of
from hetrl.describe.yaml_file import Strict, read_yaml
from hetrl.errors import InfeasibleError
from hetrl.hardware import Topology
from hetrl.lengths import Lengths
from hetrl.plan.plan import Plan
from hetrl.search import Problem, solve
from hetrl.search.core import precompile
from hetrl.simulator import simulate
from hetrl.workload import Workload, architecture

HERE = Path(__file__).resolve().parent


class Offer(Strict):
    """What can be bought; `prices` says where its prices are from."""

    title: str
    prices: str
    scenario: ScenarioFile


class Knobs(Strict):
    """`fleet.yaml`."""

    models: tuple[str, ...]
    batch: Batch
    response_mean: float
    max_staleness: int
    optimizer_steps: int
    budgets_per_hour: tuple[float, ...]
    seeds: int
    evaluations: int
    seconds: float
    offers: dict[str, Offer]


@dataclass(frozen=True)
class Case:
    """One offer, model and budget per hour."""

    knobs: Knobs
    offer: str
    model: str
    budget_per_hour: float

    @cached_property
    def problem(self) -> Problem:
        """Return the job on everything that is offered."""
        knobs, batch = self.knobs, self.knobs.batch
        job = Workload(
            algorithm="grpo",
            mode="async",
            max_staleness=knobs.max_staleness,
            samples=batch.samples,
            samples_per_prompt=batch.samples_per_prompt,
            prompt_tokens=batch.prompt_tokens,
            response=Lengths(knobs.response_mean, batch.response_tokens, "lognormal"),
            optimizer_steps_per_iteration=knobs.optimizer_steps,
            actor=architecture(self.model),
        )
        return Problem(topology_of(knobs.offers[self.offer].scenario), job)


def only(topology: Topology, gpu: str) -> Topology:
    """Return what the topology has of one GPU type."""
    kept = (replace(one, nodes=tuple(node for node in one.nodes if node.gpu == gpu)) for one in topology.sites)
    sites = {site.name: site for site in kept if site.nodes}
    links = (link for link in topology.links if sites.keys() >= set(link.between))
    return Topology(tuple(sites.values()), tuple(links))


def planned(case: Case, objective: Objective, gpus: Sequence[str] = (), known: Sequence[Plan] = ()) -> Plan:
    """Return the best plan on all types, or of those on one of these types alone; `known` ones keep the bounds, too."""
    knobs, whole = case.knobs, case.problem
    topologies = [only(whole.topology, gpu) for gpu in gpus] or [whole.topology]
    found = list(known)
    for topology, seed in product(topologies, range(knobs.seeds)):
        asked = replace(whole, topology=topology, objective=objective)
        with suppress(InfeasibleError):  # another type keeps the bounds: a budget buys some of each
            found.append(solve(asked, "sha-ea", knobs.seconds, seed, evaluations=knobs.evaluations))
    return min(found, key=lambda plan: plan_value(plan, whole.topology, objective))


class Plays:
    """Plays the plans of a case, equal ones once."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self._seconds: dict[str, float] = {}

    def bought(self, plan: Plan) -> Bought:
        """Return what a plan buys and does."""
        problem, key = self._case.problem, json.dumps(plan.to_json()["tasks"])
        if key not in self._seconds:
            self._seconds[key] = simulate(plan, problem.model).iteration_seconds
        asked, samples = asked_for(plan, problem.topology), problem.workload.samples
        per_hour = sum(one.price_per_hour for one in asked)
        predicted, played = plan.predicted.iteration_seconds, self._seconds[key]
        return Bought(
            gpus={one.gpu: one.gpus for one in asked},
            price_per_hour=per_hour,
            samples_per_second=(samples / predicted, samples / played),
            price_per_iteration=(price_of(per_hour, predicted), price_of(per_hour, played)),
        )


def compare(case: Case) -> Cell:
    """Plan and play one case."""
    plays, budget = Plays(case), Objective(COST, budget_per_hour=case.budget_per_hour)
    types = sorted({device.gpu for device in case.problem.topology.devices})
    single = planned(case, budget, types)
    mixed = planned(case, budget, known=[single])
    rate = Objective(COST, max_iteration_seconds=single.predicted.iteration_seconds)
    cheap = planned(case, rate, types, [single])
    cheap_mixed = planned(case, rate, known=[mixed, cheap])
    return Cell(case.offer, case.model, case.budget_per_hour, *map(plays.bought, (single, mixed, cheap, cheap_mixed)))


def cases(knobs: Knobs) -> Iterator[Case]:
    """Yield all cases."""
    for offer, model, budget in product(knobs.offers, knobs.models, knobs.budgets_per_hour):
        yield Case(knobs, offer, model, budget)


def main() -> None:
    """Run all, write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--jobs", type=int, default=2, help="cases at the same time, each on a core of its own")
    parser.add_argument("--offer", action="append", help="only this one (may be repeated); nothing is written")
    parser.add_argument("--model", action="append", help="only this one (may be repeated); nothing is written")
    arguments = parser.parse_args()
    knobs = read_yaml(HERE / "fleet.yaml", Knobs)
    asked = [
        case
        for case in cases(knobs)
        if case.offer in (arguments.offer or knobs.offers) and case.model in (arguments.model or knobs.models)
    ]
    precompile.main()
    cells = []
    with ProcessPoolExecutor(arguments.jobs) as pool:
        for cell in pool.map(compare, asked):
            cells.append(cell)
            print(cell.line, file=sys.stderr, flush=True)
    offers = {name: (one.title, one.prices, topology_of(one.scenario)) for name, one in knobs.offers.items()}
    table = page(cells, offers, knobs.seeds, knobs.evaluations)
    if not (arguments.offer or arguments.model):
        kept = [{**asdict(cell), "throughput_gain": cell.throughput, "price_gain": cell.price} for cell in cells]
        write_result("fleet", {"knobs": knobs.model_dump(mode="json"), "cells": kept}, table)
    print(table)


if __name__ == "__main__":
    main()
