from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from hetrl.cost.check import check
from hetrl.cost.objective import Objective
from hetrl.errors import InfeasibleError, UsageError
from hetrl.hardware import Link, Node, Site, Topology
from hetrl.plan.plan import Plan
from hetrl.problem import read_problem
from hetrl.search import Problem, Progress, sha_ea, solve
from hetrl.search.balance import balance
from hetrl.search.evaluate import Evaluator
from hetrl.search.limits import Limits
from hetrl.search.sha_ea import search
from hetrl.search.space import Space, clique, set_partitions, stars
from hetrl.workload import TASKS, Lengths, Workload, architecture
from launch.show import progress_line
from tests.search import ilp_cases

ROOT = Path(__file__).parents[2]
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


@pytest.mark.parametrize("seed", range(3))
def test_inferences_on_megatron_split_few_key_value_heads_no_further(seed: int) -> None:
    """Of qwen2.5-3b there are two, and generation may have each of them on several devices."""
    node = Topology((Site("a", (Node("n0", "l4", 8),)),))
    job = _workload("qwen2.5-3b", samples=8)
    workload = replace(job, prompt_tokens=2000, response=Lengths(256, 768, "lognormal"))
    plan = solve(Problem(node, workload), "sha-ea", 60.0, seed, evaluations=3000)  # checks the plan
    assert plan.tasks["reference_inference"].tensor_parallel <= 2


@pytest.mark.parametrize("solver", ["sha-ea", "ilp", "random"])
def test_sites_that_weights_cannot_reach_are_named_before_a_search(solver: str) -> None:
    apart = tuple(
        Site(name, (Node("n0", gpu, 4),), engines=(engine,))
        for name, gpu, engine in (("fast", "a100-80gb", "megatron"), ("slow", "l40s", "vllm"))
    )
    for links in ((), (Link(("fast", "slow"), 10.0, 0.0),)):
        with pytest.raises(InfeasibleError, match="actor_generation can be at slow, which no link joins with fast"):
            solve(Problem(Topology(apart, links), _workload()), solver, 600.0, 0)


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


@pytest.mark.parametrize(("algorithm", "mode"), [("grpo", "sync"), ("ppo", "async")])
def test_a_plan_passes_check_and_repeats_under_its_seed(algorithm: str, mode: str) -> None:
    problem = Problem(_two_sites(), _workload(algorithm=algorithm, mode=mode))
    first, second, other = (_planned(problem, seed, evaluations=5000) for seed in (3, 3, 4))
    check(first, problem.model)
    assert first.predicted.iteration_seconds > 0
    assert first.solver.name == "sha-ea"
    assert first.solver.evaluations == 5000
    assert _timeless(first) == _timeless(second)
    assert _timeless(first) != _timeless(other)


def _planned(problem: Problem, seed: int = 0, evaluations: int = 2000) -> Plan:
    return solve(problem, "sha-ea", 600.0, seed, evaluations=evaluations)


def test_inputs_are_recorded_and_progress_is_told() -> None:
    told: list[Progress] = []
    problem = Problem(_two_sites(), _workload())
    plan = solve(problem, "sha-ea", 600.0, 0, {"experiment": "sha256:00"}, evaluations=3000, report=told.append)
    assert plan.inputs == {"experiment": "sha256:00"}
    assert told
    assert [p.evaluations for p in told] == sorted({p.evaluations for p in told})
    assert [p.seconds for p in told] == sorted((p.seconds for p in told), reverse=True)
    assert max(p.arms for p in told) == 5  # generation, reference, training
    assert min(p.arms for p in told) == 1


def test_the_progress_line_tells_best_rate_and_groupings() -> None:
    line = progress_line(Progress(41.23, 300_000, 12), "sha-ea", 3.0, 10.0)
    assert line == "planning with sha-ea, 3 of 10 s: best 41.2 s per iteration, 100,000 plans/s, 12 groupings alive"
    assert "no plan yet" in progress_line(Progress(float("inf"), 1, 1), "sha-ea", 0.5, 10.0)


def test_more_evaluations_give_no_worse_plan() -> None:
    problem = Problem(_two_sites(), _workload(algorithm="ppo"))
    seconds = [_planned(problem, 1, count).predicted.iteration_seconds for count in (1000, 4000, 16000)]
    assert seconds == sorted(seconds, reverse=True)


def test_a_small_problem_ends_the_search_before_its_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once as many halvings found nothing better, here fewer than else."""
    monkeypatch.setattr(sha_ea, "EARLY", 1)
    monkeypatch.setattr(sha_ea, "PATIENCE", 1)
    topology = Topology((Site("alone", (Node("n0", "a100-80gb", 1),)),))
    plan = solve(Problem(topology, _workload("qwen3-0.6b")), "sha-ea", 3600.0, 0)
    assert plan.solver.evaluations < 1_000_000


def test_an_interrupt_returns_the_best_so_far() -> None:
    def interrupt(progress: Progress) -> None:
        if progress.seconds < float("inf"):
            raise KeyboardInterrupt

    for topology in (_two_sites(), replace(_two_sites(), links=())):  # without a link each site is searched by itself
        problem = Problem(topology, _workload())
        plan = solve(problem, "sha-ea", 3600.0, 0, report=interrupt)
        check(plan, problem.model)


def test_an_interrupt_before_any_plan_is_passed_on() -> None:
    def interrupt(progress: Progress) -> None:
        raise KeyboardInterrupt

    tight = Objective("cost", max_iteration_seconds=1e-3)
    with pytest.raises(KeyboardInterrupt):
        solve(Problem(_two_sites(), _workload(), tight), "sha-ea", 3600.0, 0, report=interrupt)


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
    problem = Problem(topology, workload)
    for plan in (*(_planned(problem, seed, 6000) for seed in range(8)), solve(problem, "verl", 30.0, 0)):
        assert {device.split("/")[0] for device in plan.tasks["actor_training"].devices} == {"alpha"}
        assert len(plan.tasks["actor_training"].replicas) == 4
        assert set(plan.tasks["actor_generation"].devices) == {"beta/beta-0/0", "gamma/gamma-0/0"}
        assert {group.tasks: group.job for group in plan.groups} == {
            ("actor_generation",): "array",
            ("actor_training",): "gang",
        }
        assert plan.site_order == ("alpha", "beta", "gamma")
        assert [(r.source, r.target) for r in plan.weight_sync.routes] == [("alpha", "beta"), ("alpha", "gamma")]


@pytest.mark.parametrize("one_group", [True, False])
def test_no_plan_of_an_excluded_grouping_is_found(one_group: bool) -> None:
    asked = ilp_cases.problem(3, "grpo", "sync")
    tasks = asked.workload.tasks
    excluded = (tasks,) if one_group else tuple((task,) for task in tasks)
    for seed in range(3):
        found = search(Evaluator(Space(asked, excluded=excluded)), Limits(math.inf, 20_000), seed)
        assert found.seconds < math.inf
        assert len(set(found.x[: len(tasks)].tolist())) != len(excluded)


def test_a_model_that_fits_nowhere_is_refused_with_numbers() -> None:
    problem = Problem(_two_sites(), _workload("qwen2.5-72b"))
    with pytest.raises(
        InfeasibleError, match=r"actor_training: qwen2.5-72b training needs 13\d\d GB over all GPUs"
    ) as it:
        solve(problem, "sha-ea", 1.0, 0)
    assert "topology has 765 GB usable; add 8 x a100-80gb" in str(it.value)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (20_000_000, r"actor_generation: one sequence of 20,000,\d+ tokens has \d+ GB of keys and values on each of"),
        (2_500_000, r"actor_training: one sequence of 2,500,\d+ tokens has \d+ GB of activations on each of 4 x"),
    ],
)
def test_a_sequence_that_fits_nowhere_is_refused(tokens: int, message: str) -> None:
    topology = Topology((Site("alps", (Node("n0", "a100-80gb", 4), Node("n1", "a100-80gb", 4))),))
    long = replace(_workload(), response=Lengths(tokens, tokens))
    with pytest.raises(InfeasibleError, match=f"{message}.*; shorten batch.prompt_tokens"):
        solve(Problem(topology, long), "sha-ea", 1.0, 0)


def test_a_missing_engine_is_named() -> None:
    topology = Topology((Site("alps", (Node("n0", "a100-80gb", 4),), engines=("megatron",)),))
    with pytest.raises(InfeasibleError, match="actor_generation needs the engine vllm, which no site has"):
        solve(Problem(topology, _workload()), "sha-ea", 1.0, 0)


def test_sites_without_links_do_not_join_a_plan() -> None:
    topology = Topology(_two_sites().sites)
    assert stars(topology) == [frozenset({"fast"}), frozenset({"slow"})]
    assert clique(topology) == {"fast"}
    assert _planned(Problem(topology, _workload())).site_order == ("fast",)


def test_a_link_that_carries_nothing_is_no_link() -> None:
    topology = Topology(_two_sites().sites, (Link(("fast", "slow"), 10.0, 0.0),))
    assert _planned(Problem(topology, _workload())).site_order == ("fast",)


def test_four_thousand_gpus_are_planned_for() -> None:
    sites = tuple(
        Site(f"s{index}", tuple(Node(f"n{node}", gpu, 8) for node in range(128)))
        for index, gpu in enumerate(("a100-80gb", "l40s", "h100", "a100-40gb"))
    )
    names = [site.name for site in sites]
    links = tuple(Link((a, b), 10.0, 10.0) for i, a in enumerate(names) for b in names[i + 1 :])
    problem = Problem(Topology(sites, links), _workload(samples=8192))
    plan = _planned(problem, evaluations=1000)
    check(plan, problem.model)


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


def test_where_the_evaluations_found_no_plan_the_error_says_so() -> None:
    with pytest.raises(InfeasibleError, match=r"in 0 evaluations; 0 were compared.*raise planner\.evaluations"):
        _planned(Problem(_two_sites(), _workload()), 0, 0)


@settings(max_examples=12)
@given(
    topologies(), st.sampled_from(["qwen3-0.6b", "qwen3-1.7b"]), st.sampled_from(["sync", "async"]), st.integers(0, 9)
)
def test_every_plan_passes_check(topology: Topology, model: str, mode: str, seed: int) -> None:
    problem = Problem(topology, _workload(model, mode=mode))
    try:
        plan = _planned(problem, seed)  # checks the plan itself
    except InfeasibleError as error:
        assert "GB" in str(error) or "were compared, too few" in str(error)
        return
    assert sum(replica.samples for replica in plan.tasks["actor_training"].replicas) == 64


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_on_the_papers_scenarios_the_search_is_no_worse_than_verl(scenario: str) -> None:
    found = read_problem(ROOT / "configs" / f"paper-{scenario}.yaml")
    problem = Problem(found.topology, found.workload)
    uniform = solve(problem, "verl", 3.0, 0)
    assert _planned(problem, 0, 50_000).predicted.iteration_seconds <= uniform.predicted.iteration_seconds
