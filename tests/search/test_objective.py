"""What plans are chosen for: the compiled value against the plan itself, and bounds with the errors of broken ones."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from hetrl.cost.charges import asked_for, held_by_site
from hetrl.cost.objective import COST, KINDS, TIME_TO_RESULT, bounds, plan_value
from hetrl.errors import InfeasibleError, UsageError
from hetrl.hardware import Link, Node, Site, Topology
from hetrl.plan.plan import Plan, Predicted, node_of, site_of
from hetrl.search import SOLVERS, Objective, Problem, solve
from hetrl.search.core.workspace import INFEASIBLE, UNFIT
from hetrl.search.evaluate import Evaluator
from hetrl.search.space import Space
from hetrl.workload import Workload, architecture
from launch.cli import OBJECTIVES, SOLVERS as LISTED
from tests.search.search_cases import MADE, feasible, job, jobs, seeds, topologies

limits = st.one_of(st.just(math.inf), st.floats(0.01, 300))


@st.composite
def priced(draw: st.DrawFn) -> Topology:
    """Draw sites with prices, queues and budgets, some of which grant whole nodes."""
    topology = draw(topologies())
    prices = draw(st.sampled_from([(0.0,), (1.5,), (0.0, 0.5, 4.0)]))

    def site(one: Site) -> Site:
        price = draw(st.sampled_from(prices))
        return replace(
            one,
            nodes=tuple(replace(node, price_per_gpu_hour=price) for node in one.nodes),
            allocation=draw(st.sampled_from(["node", "gpu"])),
            queue_hours=draw(st.sampled_from([0.0, 0.25, 3.0])),
            budget_gpu_hours=draw(st.sampled_from([None, 0.5, 50.0])),
        )

    return replace(topology, sites=tuple(map(site, topology.sites)))


objectives = st.one_of(
    st.builds(Objective, st.just(COST), max_iteration_seconds=limits),
    st.builds(Objective, st.just(COST), budget_per_hour=limits),
    st.builds(
        Objective,
        st.just(TIME_TO_RESULT),
        steps=st.integers(1, 300),
        walltime_seconds=st.sampled_from([600.0, 7200.0, math.inf]),
        queue_timeout_seconds=st.sampled_from([600.0, 86400.0]),
        budget_gpu_hours=limits,
    ),
)


def by_hand(plan: Plan, topology: Topology, objective: Objective) -> tuple[float, float]:
    """Return value and summed excess, counted device by device."""
    used = {device for task in plan.tasks.values() for device in task.devices}
    granted = {node_of(d) for d in used if topology.site_by_name[site_of(d)].allocation == "node"}
    held = [d.id for d in topology.devices if d.id in used or node_of(d.id) in granted]
    prices = [topology.node_by_id[node_of(device)].price_per_gpu_hour for device in held]
    free = not any(node.price_per_gpu_hour for node in topology.node_by_id.values())
    per_hour, seconds = (float(len(held)) if free else sum(prices)), plan.predicted.iteration_seconds
    starts = {site_of(device): topology.site_by_name[site_of(device)].queue_hours * 3600 for device in held}
    end = max(starts.values()) + objective.steps * seconds
    hours = {site: sum(site_of(d) == site for d in held) * (end - start) / 3600 for site, start in starts.items()}
    if objective.kind == COST:
        ratios = [seconds / objective.max_iteration_seconds, per_hour / objective.budget_per_hour]
        cheapest = math.isinf(objective.budget_per_hour)
        value = seconds * (per_hour / 3600 + 1e-6) if cheapest else seconds
    else:
        ratios = [
            (max(starts.values()) - min(starts.values())) / objective.queue_timeout_seconds,
            (end - min(starts.values())) / objective.walltime_seconds,
            sum(hours.values()) / objective.budget_gpu_hours,
            *(hours[site] / (topology.site_by_name[site].budget_gpu_hours or math.inf) for site in starts),
        ]
        value = end
    return value, sum(max(ratio - 1, 0.0) for ratio in ratios)


@settings(max_examples=60)
@given(priced(), jobs, objectives, seeds)
def test_value_and_bounds_are_those_of_the_decoded_plan(
    topology: Topology, workload: Workload, objective: Objective, seed: int
) -> None:
    x = feasible(Evaluator(Space(Problem(topology, workload))), seed)
    evaluator = Evaluator(Space(Problem(topology, workload, objective)))
    found = evaluator.graded(x)
    plan = evaluator.assemble(x, MADE)
    assert evaluator.iteration_seconds(x) == pytest.approx(plan.predicted.iteration_seconds, rel=1e-9)
    value, excess = by_hand(plan, topology, objective)
    if excess < 1e-6:
        assert found == pytest.approx(value, rel=1e-9)
        assert plan_value(plan, topology, objective) == pytest.approx(value, rel=1e-9)
    else:
        assert found == pytest.approx(INFEASIBLE * (1 + excess / (1 + excess)), rel=1e-6)
        assert found < UNFIT
        assert plan_value(plan, topology, objective) == math.inf
        broken = sum(bound.excess for bound in bounds(plan, topology, objective))
        assert broken == pytest.approx(excess, rel=1e-6)
        assert evaluator.parts(x)[0] == math.inf


def two_sites() -> Topology:
    """Four dear A100 and, behind a link, four cheap L40S that wait two hours."""
    fast = Site("fast", (Node("n", "a100-80gb", 4, price_per_gpu_hour=4.0),), allocation="gpu", budget_gpu_hours=900.0)
    slow = Site("slow", (Node("m", "l40s", 4, price_per_gpu_hour=1.0),), allocation="gpu", queue_hours=2.0)
    return Topology((fast, slow), (Link(("fast", "slow"), 5.0, 5.0),))


@cache
def drawn_values(objective: Objective) -> np.ndarray:
    """Return the values of the same plans, drawn at random, under an objective."""
    evaluator = Evaluator(Space(Problem(two_sites(), job(algorithm="grpo"), objective)))
    return evaluator.values(np.stack([evaluator.random(seed) for seed in range(2000)]))


@pytest.mark.parametrize(
    ("kind", "key", "some"),
    [
        (COST, "max_iteration_seconds", (5.0, 20.0, 40.0, 200.0)),
        (COST, "budget_per_hour", (2.0, 5.0, 12.0, 30.0)),
        (TIME_TO_RESULT, "budget_gpu_hours", (0.1, 1.0, 5.0, 60.0)),
        (TIME_TO_RESULT, "walltime_seconds", (60.0, 600.0, 3600.0, 9000.0)),
    ],
)
def test_a_looser_bound_never_makes_the_best_plan_worse(kind: str, key: str, some: tuple[float, ...]) -> None:
    values = [drawn_values(Objective(kind, steps=30, **{key: bound})) for bound in (*some, 1e9)]
    best = [float(value.min()) for value in values]
    assert best == sorted(best, reverse=True)
    kept = [int(np.isfinite(value).sum()) for value in values]
    assert kept == sorted(kept)
    assert kept[0] < kept[-1]


def planned(objective: Objective, evaluations: int = 8000) -> Plan:
    problem = Problem(two_sites(), job(algorithm="grpo"), objective)
    return solve(problem, "sha-ea", 600.0, 0, evaluations=evaluations)


@pytest.mark.parametrize("baseline", ["verl-expert", "areal-hex"])
def test_less_cost_at_a_baselines_speed_and_more_speed_at_its_cost(baseline: str) -> None:
    theirs = solve(Problem(two_sites(), job(algorithm="grpo", staleness=1)), baseline, 5.0, 0).predicted
    problem = Problem(two_sites(), job(algorithm="grpo", staleness=1))
    assert theirs.price_per_hour is not None and theirs.cost_per_iteration is not None
    cheap, fast = (
        solve(replace(problem, objective=one), "sha-ea", 600.0, 0, evaluations=20_000).predicted
        for one in (
            Objective(COST, max_iteration_seconds=theirs.iteration_seconds),
            Objective(COST, budget_per_hour=theirs.price_per_hour),
        )
    )
    assert cheap.iteration_seconds <= theirs.iteration_seconds * (1 + 1e-9)
    assert cheap.cost_per_iteration is not None and cheap.cost_per_iteration <= theirs.cost_per_iteration
    assert fast.price_per_hour is not None and fast.price_per_hour <= theirs.price_per_hour * (1 + 1e-9)
    assert fast.iteration_seconds <= theirs.iteration_seconds


def test_a_plan_records_what_it_was_chosen_for_and_what_it_costs() -> None:
    fastest, cheapest = planned(Objective()), planned(Objective(COST))
    assert (fastest.solver.objective, cheapest.solver.objective) == ("throughput", "cost")
    for plan in (fastest, cheapest):
        told, held = plan.predicted, {device for group in plan.groups for device in group.devices}
        price = sum(4.0 if site_of(device) == "fast" else 1.0 for device in held)
        assert told.price_per_hour == pytest.approx(price)
        assert told.cost_per_iteration == pytest.approx(price * told.iteration_seconds / 3600)
        assert told.gpu_hours_per_iteration == pytest.approx(len(held) * told.iteration_seconds / 3600)
    assert (cheapest.predicted.cost_per_iteration or 0) < (fastest.predicted.cost_per_iteration or 0)
    assert cheapest.predicted.iteration_seconds > fastest.predicted.iteration_seconds


def test_the_cheapest_plan_at_a_throughput_does_it_and_is_no_dearer_than_the_fastest() -> None:
    fastest = planned(Objective(), 16_000).predicted
    for share in (0.3, 0.7, 1.0):
        rate = share * fastest.samples_per_second
        told = planned(Objective(COST, max_iteration_seconds=128 / rate, samples_per_iteration=128), 16_000).predicted
        assert told.samples_per_second >= rate * (1 - 1e-6)
        assert (told.cost_per_iteration or 0) <= (fastest.cost_per_iteration or 0) * (1 + 1e-6)


def tiny() -> Problem:
    """A node of two cheap GPUs and one of a dear one, whose few plans a short search has all met but for some."""
    sites = (
        Site("a", (Node("n0", "l40s", 2, price_per_gpu_hour=1.0),), allocation="gpu"),
        Site("b", (Node("n0", "h100", 1, price_per_gpu_hour=4.0),), allocation="gpu"),
    )
    few_layers = replace(architecture("qwen3-1.7b"), name="few-layers", layers=6, vocabulary=32_000)
    workload = replace(job(algorithm="grpo"), actor=few_layers, reference=None, reward=None)
    return Problem(Topology(sites, (Link(("a", "b"), 1.0, 50.0),)), workload)


@cache
def tiny_plan(objective: Objective) -> Predicted:
    return solve(replace(tiny(), objective=objective), "sha-ea", 600.0, 0, evaluations=30_000).predicted


SEARCHED = 1 + 1e-3  # what the search of a tiny problem may miss of the optimum
shares = st.tuples(st.floats(0, 1), st.floats(0, 1)).map(sorted)


@settings(max_examples=12)
@given(shares)
def test_less_throughput_is_wanted_for_no_more_money(some: list[float]) -> None:
    slowest, fastest = (tiny_plan(one).samples_per_second for one in (Objective(COST), Objective()))
    few, many = (
        tiny_plan(Objective(COST, max_iteration_seconds=128 / (slowest + share * (fastest - slowest) * (1 - 1e-6))))
        for share in some
    )
    assert (few.cost_per_iteration or 0) <= (many.cost_per_iteration or 0) * SEARCHED


@settings(max_examples=12)
@given(shares)
def test_more_money_does_no_less(some: list[float]) -> None:
    poor, rich = (tiny_plan(Objective(COST, budget_per_hour=1.0 + 5.0 * share)) for share in some)
    assert poor.samples_per_second <= rich.samples_per_second * SEARCHED


@settings(max_examples=50)
@given(priced(), jobs, seeds)
def test_what_is_asked_for_is_offered_and_sums_to_the_price(topology: Topology, workload: Workload, seed: int) -> None:
    evaluator = Evaluator(Space(Problem(topology, workload)))
    plan = evaluator.assemble(feasible(evaluator, seed), MADE)
    asked = asked_for(plan, topology)
    assert all(0 < one.gpus <= one.offered for one in asked)
    for site, held in held_by_site(plan, topology).items():
        assert sum(one.gpus for one in asked if one.site == site) == held
    free = not any(node.price_per_gpu_hour for node in topology.node_by_id.values())
    per_hour = sum(one.gpus for one in asked) if free else sum(one.price_per_hour for one in asked)
    value, _ = by_hand(plan, topology, Objective(COST))
    assert value == pytest.approx(plan.predicted.iteration_seconds * (per_hour / 3600 + 1e-6))


def test_a_short_run_does_not_wait_for_a_site_that_a_long_one_waits_for() -> None:
    sites = (Site("here", (Node("n", "a100-80gb", 2),)), Site("busy", (Node("n", "a100-80gb", 4),), queue_hours=2.0))
    topology = Topology(sites, (Link(("here", "busy"), 0.1, 100.0),))
    short, long = (
        solve(Problem(topology, job(algorithm="grpo"), asked), "sha-ea", 600.0, 0, evaluations=8000)
        for asked in (Objective(TIME_TO_RESULT, steps=1), Objective(TIME_TO_RESULT, steps=20_000))
    )
    assert short.site_order == ("here",)
    assert "busy" in long.site_order


@pytest.mark.parametrize(
    ("objective", "message"),
    [
        (
            Objective(COST, max_iteration_seconds=0.01),
            r"keeps planner\.max_iteration_seconds: .* to [0-9.]+,",
        ),
        (
            Objective(COST, budget_per_hour=0.25),
            r"needs (\d+) per hour of 0\.25 .* raise planner\.\w+ to \1,",
        ),
        (
            Objective(COST, max_iteration_seconds=128 / 5000, samples_per_iteration=128),
            r"min_samples_per_second: the nearest one does ([0-9.]+) samples/s of 5000 .* lower planner\.\w+ to \1,",
        ),
        (
            Objective(TIME_TO_RESULT, walltime_seconds=1, steps=9),
            r"keeps launch\.walltime: .* raise launch\.walltime to \d\d:\d\d:\d\d,",
        ),
        (
            Objective(TIME_TO_RESULT, budget_gpu_hours=1e-3, steps=9),
            r"of 0\.001 \(planner\.budget_gpu_hours\)",
        ),
    ],
)
def test_bounds_that_no_plan_keeps_are_named_with_the_smallest_change(objective: Objective, message: str) -> None:
    with pytest.raises(InfeasibleError, match=message) as caught:
        planned(objective)
    assert caught.value.exit_code == 3


def test_the_change_that_the_error_names_is_enough() -> None:
    with pytest.raises(InfeasibleError) as caught:
        planned(Objective(COST, max_iteration_seconds=0.01))
    named = float(str(caught.value).split("max_iteration_seconds to ")[1].split(",")[0])
    assert planned(Objective(COST, max_iteration_seconds=named)).predicted.iteration_seconds <= named
    with pytest.raises(InfeasibleError) as caught:
        planned(Objective(COST, max_iteration_seconds=0.01, samples_per_iteration=128))
    named = float(str(caught.value).split("min_samples_per_second to ")[1].split(",")[0])
    slow = planned(Objective(COST, max_iteration_seconds=128 / named, samples_per_iteration=128)).predicted
    assert slow.samples_per_second >= named * (1 - 1e-6)


def test_a_sites_own_budget_binds_too() -> None:
    topology = two_sites()
    poor = tuple(replace(site, budget_gpu_hours=0.001) for site in topology.sites)
    problem = Problem(replace(topology, sites=poor), job(algorithm="grpo"), Objective(TIME_TO_RESULT, steps=9))
    with pytest.raises(InfeasibleError, match=r"keeps (fast|slow): budget_gpu_hours"):
        solve(problem, "sha-ea", 600.0, 0, evaluations=4000)


@pytest.mark.parametrize("solver", ["ilp", "verl"])
def test_a_solver_that_knows_throughput_alone_says_so(solver: str) -> None:
    problem = Problem(two_sites(), job(algorithm="grpo"), Objective(COST))
    with pytest.raises(UsageError, match=f'solver "{solver}" plans for throughput alone; for cost take'):
        solve(problem, solver, 1.0, 0)


def test_only_sha_ea_is_kept_to_the_space_of_ilp() -> None:
    problem = Problem(two_sites(), job(algorithm="grpo"))
    for solver in ("ilp", "verl"):
        with pytest.raises(UsageError, match="only sha-ea can be kept to the plan space of ilp"):
            solve(problem, solver, 1.0, 0, narrow=True)
    plan = solve(problem, "sha-ea", 600.0, 0, evaluations=4000, narrow=True)
    assert max(task.pipeline_parallel for name, task in plan.tasks.items() if "training" in name) <= 4


def test_the_command_line_lists_every_solver_and_objective() -> None:
    assert set(LISTED) == set(SOLVERS)
    assert OBJECTIVES == KINDS
