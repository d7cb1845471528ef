from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetrl.check import check
from hetrl.config import read_problem
from hetrl.errors import InfeasibleError, UsageError
from hetrl.hardware import Link, Node, Site, Topology
from hetrl.plan import Plan
from hetrl.search import Problem, solve
from hetrl.search.balance import balance
from hetrl.search.space import Space, clique, set_partitions, stars
from hetrl.workload import TASKS, Lengths, Workload, architecture

ROOT = Path(__file__).parent.parent
SCENARIOS = ("single-region", "multi-region-hybrid", "multi-country", "multi-continent")


def _workload(name: str = "qwen3-1.7b", algorithm: str = "grpo", mode: str = "sync", samples: int = 64) -> Workload:
    model = architecture(name)
    return Workload(
        algorithm=algorithm,
        mode=mode,
        max_staleness=2 if mode == "async" else 0,
        samples=samples,
        samples_per_prompt=8,
        prompt_tokens=256,
        response=Lengths(256, 512, "uniform"),
        optimizer_steps_per_iteration=2,
        actor=model,
        critic=model if algorithm == "ppo" else None,
        reference=model,
    )


def _two_sites() -> Topology:
    fast = Site("fast", (Node("n0", "a100-80gb", 4), Node("n1", "a100-80gb", 4)))
    slow = Site("slow", tuple(Node(f"m{index}", "l40s", 2) for index in range(2)))
    return Topology((fast, slow), (Link(("fast", "slow"), 10.0, 5.0),))


def _timeless(plan: Plan) -> Plan:
    return replace(plan, solver=replace(plan.solver, seconds=0.0))


def test_set_partitions_are_counted_by_bell() -> None:
    counts = [len({frozenset(map(frozenset, p)) for p in set_partitions(TASKS[:size])}) for size in range(7)]
    assert counts == [1, 1, 2, 5, 15, 52, 203]


def test_work_is_divided_for_the_least_makespan() -> None:
    fast, slow = [1.0 * n for n in range(1, 11)], [3.0 * n for n in range(1, 11)]
    assert balance([fast, slow], [1, 1], 8) == [[6], [2]]
    assert balance([fast, [100.0 * n for n in range(1, 11)]], [2, 1], 10) == [[5, 5], [0]]
    assert balance([fast, slow], [1, 2], 3, least=1) == [[1], [1, 1]]


@given(st.lists(st.tuples(st.floats(0.1, 10), st.integers(1, 4)), min_size=1, max_size=4), st.integers(1, 60))
def test_no_single_move_of_a_unit_improves_a_division(kinds: list[tuple[float, int]], units: int) -> None:
    tables = [[rate * n for n in range(1, units + 1)] for rate, _ in kinds]
    shares = balance(tables, [count for _, count in kinds], units)
    assert sum(map(sum, shares)) == units
    ends = [table[n - 1] if n else 0.0 for table, share in zip(tables, shares, strict=True) for n in share]
    last = max(ends)
    if ends.count(last) == 1 and len(ends) > 1:
        following = [table[n] for table, share in zip(tables, shares, strict=True) for n in share if n < units]
        assert min(following) >= last * (1 - 1e-9)


def test_packing_fills_whole_nodes_first_and_never_tears_a_remainder() -> None:
    space = Space(Problem(_two_sites(), _workload()))
    packed = space.pack([(6, 0), (2, 1)])
    assert packed is not None
    assert [[chunk.devices[0].node for chunk in group] for group in packed] == [["n0", "n1"], ["n1", "m0"]]
    assert space.pack([(3, 0), (3, 0), (2, 0)]) is None
    devices = [device for group in packed for chunk in group for device in chunk.devices]
    assert len(devices) == len(set(devices)) == 9


def test_an_unknown_solver_is_answered_with_the_nearest() -> None:
    with pytest.raises(UsageError, match='unknown solver "sha-ae"; did you mean "sha-ea"'):
        solve(Problem(_two_sites(), _workload()), "sha-ae", 1.0, 0)


@pytest.mark.parametrize("solver", ["sha-ea", "verl"])
@pytest.mark.parametrize(("algorithm", "mode"), [("grpo", "sync"), ("ppo", "async")])
def test_a_plan_passes_check_and_repeats_under_its_seed(solver: str, algorithm: str, mode: str) -> None:
    problem = Problem(_two_sites(), _workload(algorithm=algorithm, mode=mode))
    first = solve(problem, solver, 120.0, 3, {"experiment": "sha256:00"})
    check(first, problem.topology, problem.workload)
    assert first.inputs == {"experiment": "sha256:00"}
    assert first.predicted.iteration_seconds > 0
    assert first.solver.name == solver
    assert first.solver.evaluations > 0
    if algorithm == "grpo":
        assert _timeless(first) == _timeless(solve(problem, solver, 120.0, 3, {"experiment": "sha256:00"}))


def test_verl_is_uniform_over_all_gpus() -> None:
    problem = Problem(_two_sites(), _workload(samples=192))
    plan = solve(problem, "verl", 1.0, 0)
    everything = {device.id for device in problem.topology.devices}
    assert len(plan.groups) == 1
    assert set(plan.groups[0].devices) == everything
    for task in plan.tasks.values():
        assert set(task.devices) == everything
        shapes = {tuple((len(s.devices), s.layers) for s in replica.stages) for replica in task.replicas}
        assert len(shapes) == 1
        assert max(r.samples for r in task.replicas) - min(r.samples for r in task.replicas) <= 8


def test_sites_are_used_for_the_engines_that_they_have() -> None:
    sites = (
        Site("alpha", (Node("alpha-0", "cpu", 4, nic_gbps=10, host_memory_gb=8),), engines=("megatron",)),
        *(Site(name, (Node(f"{name}-0", "cpu", 1, nic_gbps=10),), engines=("vllm",)) for name in ("beta", "gamma")),
    )
    names = [("alpha", "beta"), ("alpha", "gamma"), ("beta", "gamma")]
    topology = Topology(sites, tuple(Link(pair, 0.1, 10) for pair in names))
    workload = replace(_workload("tiny-qwen3"), reference=None, weight_bytes=4, prompt_tokens=4, response=Lengths(3, 3))
    for solver in ("sha-ea", "verl"):
        plan = solve(Problem(topology, workload), solver, 30.0, 0)
        assert {device.split("/")[0] for device in plan.tasks["actor_training"].devices} == {"alpha"}
        assert len(plan.tasks["actor_training"].replicas) == 4
        assert set(plan.tasks["actor_generation"].devices) == {"beta/beta-0/0", "gamma/gamma-0/0"}
        assert {group.tasks: group.job for group in plan.groups} == {
            ("actor_generation",): "array",
            ("actor_training",): "gang",
        }
        assert plan.site_order == ("alpha", "beta", "gamma")
        assert [(r.source, r.target) for r in plan.weight_sync.routes] == [("alpha", "beta"), ("alpha", "gamma")]


def test_a_model_that_fits_nowhere_is_refused_with_numbers() -> None:
    problem = Problem(_two_sites(), _workload("qwen2.5-72b"))
    with pytest.raises(
        InfeasibleError, match=r"actor_training: qwen2.5-72b training needs 13\d\d GB over all GPUs"
    ) as it:
        solve(problem, "sha-ea", 1.0, 0)
    assert "topology has 765 GB usable; add 8 x a100-80gb" in str(it.value)


def test_a_missing_engine_is_named() -> None:
    topology = Topology((Site("alps", (Node("n0", "a100-80gb", 4),), engines=("megatron",)),))
    with pytest.raises(InfeasibleError, match="actor_generation needs the engine vllm, which no site has"):
        solve(Problem(topology, _workload()), "sha-ea", 1.0, 0)


def test_sites_without_links_do_not_join_a_plan() -> None:
    topology = Topology(_two_sites().sites)
    assert stars(topology) == [frozenset({"fast"}), frozenset({"slow"})]
    assert clique(topology) == {"fast"}
    for solver in ("sha-ea", "verl"):
        plan = solve(Problem(topology, _workload(algorithm="grpo")), solver, 20.0, 0)
        assert plan.site_order == ("fast",)


GPUS = ("a100-40gb", "a100-80gb", "l40s", "l4", "h100")
nodes = st.tuples(st.sampled_from(GPUS), st.sampled_from([1, 2, 3, 4, 8]), st.integers(1, 2))


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    sites = []
    for index in range(draw(st.integers(1, 3))):
        gpu, gpus, count = draw(nodes)
        sites.append(Site(f"s{index}", tuple(Node(f"n{number}", gpu, gpus) for number in range(count))))
    pairs = [(a.name, b.name) for position, a in enumerate(sites) for b in sites[position + 1 :]]
    links = [
        Link(pair, draw(st.floats(0.1, 60)), draw(st.floats(0.3, 10))) for pair in pairs if draw(st.integers(0, 5))
    ]
    return Topology(tuple(sites), tuple(links))


@settings(max_examples=12, deadline=None)
@given(
    topologies(), st.sampled_from(["qwen3-0.6b", "qwen3-1.7b"]), st.sampled_from(["sync", "async"]), st.integers(0, 9)
)
def test_every_plan_of_every_solver_passes_check(topology: Topology, model: str, mode: str, seed: int) -> None:
    problem = Problem(topology, _workload(model, mode=mode))
    for solver in ("sha-ea", "verl"):
        try:
            plan = solve(problem, solver, 1.0, seed)  # checks the plan itself
        except InfeasibleError as error:
            assert "GB" in str(error) or "fits" in str(error)
            continue
        assert sum(replica.samples for replica in plan.tasks["actor_training"].replicas) == 64


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_on_the_papers_scenarios_the_search_is_no_worse_than_verl(scenario: str) -> None:
    found = read_problem(ROOT / "configs" / f"paper-{scenario}.yaml")
    problem = Problem(found.topology, found.workload)
    best = solve(problem, "sha-ea", 3.0, 0, found.digests)
    uniform = solve(problem, "verl", 3.0, 0)
    check(best, problem.topology, problem.workload)
    assert best.predicted.iteration_seconds <= uniform.predicted.iteration_seconds
