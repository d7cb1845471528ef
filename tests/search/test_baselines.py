from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings, strategies as st

from hetrl.cost.iteration import predict
from hetrl.cost.model import CostModel
from hetrl.errors import InfeasibleError
from hetrl.hardware import Device, Link, Node, Site, Topology
from hetrl.plan.plan import Plan, node_of, site_of
from hetrl.search import Problem, solve
from hetrl.search.assemble import Made, finish
from hetrl.search.baselines import PLANS, TUNING, uniform
from hetrl.search.baselines.areal_hex_milp import Column, Pool, Rollout, choose
from hetrl.search.baselines.by_speed import by_speed, samples_by_rate
from hetrl.search.baselines.memory import with_kv_cache
from hetrl.search.baselines.verl_expert import nearest_first
from hetrl.workload import ACTOR_GENERATION, ACTOR_TRAINING, Lengths, Workload, architecture

SYSTEMS = ("verl", "verl-expert", "streamrl", "areal-hex")
DISAGGREGATED = ("streamrl", "areal-hex")
ENGINE_SITES = (("alpha", "megatron"), ("beta", "vllm"))
BUDGET_SECONDS = 60.0  # far more than any of these needs: it must not decide


def workload(name: str = "qwen3-1.7b", algorithm: str = "grpo", mode: str = "sync", response: int = 512) -> Workload:
    model = architecture(name)
    return Workload(
        algorithm=algorithm,
        mode=mode,
        max_staleness=1 if mode == "async" else 0,
        samples=64,
        samples_per_prompt=8,
        prompt_tokens=256,
        response=Lengths(response, response),
        optimizer_steps_per_iteration=2,
        actor=model,
        critic=model if algorithm == "ppo" else None,
        reference=model,
    )


def two_sites(gbps: float = 5.0) -> Topology:
    fast = Site("fast", (Node("n0", "a100-80gb", 4), Node("n1", "a100-80gb", 4)))
    slow = Site("slow", tuple(Node(f"m{index}", "l4", 4) for index in range(2)))
    return Topology((fast, slow), (Link(("fast", "slow"), 10.0, gbps),))


def one_site(gpu: str = "a100-80gb", nodes: int = 8) -> Topology:
    return Topology((Site("alps", tuple(Node(f"n{index}", gpu, 8) for index in range(nodes))),))


def devices_of(plan: Plan, *tasks: str) -> set[str]:
    return {device for name in tasks or plan.tasks for device in plan.tasks[name].devices}


def others(plan: Plan) -> list[str]:
    return [name for name in plan.tasks if name != ACTOR_GENERATION]


def test_every_baseline_says_how_it_was_tuned() -> None:
    assert set(PLANS) == set(TUNING)
    assert all(text and "\n" not in text for text in TUNING.values())


@pytest.mark.parametrize("solver", SYSTEMS)
@pytest.mark.parametrize(("algorithm", "mode"), [("grpo", "sync"), ("ppo", "async")])
def test_a_plan_is_legal_repeats_and_asks_for_the_reduction_of_the_job(solver: str, algorithm: str, mode: str) -> None:
    job = replace(workload(algorithm=algorithm, mode=mode), gradient_dtype="bf16")
    problem = Problem(two_sites(), job)
    plan = solve(problem, solver, BUDGET_SECONDS, 0)  # checks the plan itself
    again = solve(problem, solver, BUDGET_SECONDS, 1)
    assert (plan.tasks, plan.groups, plan.predicted) == (again.tasks, again.groups, again.predicted)
    assert plan.solver.evaluations > 10
    assert plan.tasks[ACTOR_TRAINING].gradient_dtype == "bf16"


def test_verl_runs_every_task_on_all_gpus_in_equal_parts() -> None:
    problem = Problem(two_sites(), workload(algorithm="ppo"))
    plan = solve(problem, "verl", BUDGET_SECONDS, 0)
    assert len(plan.groups) == 1
    for task in plan.tasks.values():
        assert set(task.devices) == {device.id for device in problem.topology.devices}
        assert len({tuple((len(s.devices), s.layers) for s in replica.stages) for replica in task.replicas}) == 1
        assert max(r.samples for r in task.replicas) - min(r.samples for r in task.replicas) <= 8
    assert plan.tasks[ACTOR_TRAINING].rank_order() == tuple(device.id for device in problem.topology.devices)


def uniform_plans(problem: Problem) -> list[Plan]:
    """Every setting of verl's on all nodes, one after the other, with everything offloaded between the tasks."""
    nodes = uniform.by_node(problem.topology.devices)
    inference = uniform.fastest_inference("reference_inference", nodes, problem)
    assert inference is not None
    found = []
    for tensor, pipeline, micro_batch, recompute in product((1, 2, 4), (1, 2, 4, 8), (1, 2, 4, 8), ("none", "full")):
        setting = ("stages", "data_parallel", micro_batch, recompute)
        training = uniform.training_layout(ACTOR_TRAINING, nodes, tensor, pipeline, setting, problem)
        for generation in uniform.generation_layouts(nodes, problem):
            tasks = {ACTOR_GENERATION: generation, "reference_inference": inference, ACTOR_TRAINING: training}
            if training is None:
                continue
            offloaded = {name: replace(task, idle_state="offload") for name, task in tasks.items() if task}
            whole = with_kv_cache(offloaded, problem)
            if whole:
                found.append(finish(problem, [whole], Made("trial", 0, {})))
    return found


@pytest.mark.parametrize("gbps", [0.5, 10.0])
def test_no_uniform_layout_that_a_user_could_try_beats_verls(gbps: float) -> None:
    problem = Problem(two_sites(gbps), workload())
    plan = solve(problem, "verl", BUDGET_SECONDS, 0)
    tried = uniform_plans(problem)
    assert len(tried) > 50
    assert plan.predicted.iteration_seconds <= min(trial.predicted.iteration_seconds for trial in tried) * (1 + 1e-9)


def test_over_a_slow_link_verl_sends_activations_instead_of_gradients() -> None:
    sites = tuple(Site(name, (Node("n0", "a100-80gb", 8),)) for name in ("a", "b"))
    plan = solve(Problem(Topology(sites, (Link(("a", "b"), 1.0, 0.3),)), workload()), "verl", BUDGET_SECONDS, 0)
    stages = zip(*(replica.stages for replica in plan.tasks[ACTOR_TRAINING].replicas), strict=True)
    assert [len({site_of(stage.devices[0]) for stage in replicas}) for replicas in stages] == (
        [1] * plan.tasks[ACTOR_TRAINING].pipeline_parallel
    )
    assert len(plan.site_order) == 2


def test_the_expert_leaves_far_slow_gpus_out_and_is_never_slower_than_verl() -> None:
    problem = Problem(two_sites(0.3), workload(algorithm="ppo"))
    expert, usual = (solve(problem, name, BUDGET_SECONDS, 0) for name in ("verl-expert", "verl"))
    assert {site_of(device) for device in devices_of(expert)} == {"fast"}
    assert len(expert.groups) == 1
    assert expert.predicted.iteration_seconds < usual.predicted.iteration_seconds
    alike = Problem(one_site(nodes=3), workload())
    assert (
        solve(alike, "verl-expert", BUDGET_SECONDS, 0).predicted.iteration_seconds
        <= solve(alike, "verl", BUDGET_SECONDS, 0).predicted.iteration_seconds
    )


def test_sites_are_walked_from_nearest_to_nearest() -> None:
    sites = tuple(Site(name, (Node("n0", "l4", 1),)) for name in "abc")
    gbps = {("a", "b"): 1.0, ("a", "c"): 5.0, ("b", "c"): 3.0}
    topology = Topology(sites, tuple(Link(pair, 1.0, value) for pair, value in gbps.items()))
    assert nearest_first(topology, "a", ["a", "b", "c"]) == ["a", "c", "b"]
    assert nearest_first(topology, "b", ["a", "b", "c"]) == ["b", "c", "a"]


@pytest.mark.parametrize("solver", DISAGGREGATED)
@pytest.mark.parametrize("topology", [two_sites(), one_site(nodes=1)], ids=["two sites", "one node"])
def test_generation_and_training_share_no_gpu(solver: str, topology: Topology) -> None:
    plan = solve(Problem(topology, workload(mode="async")), solver, BUDGET_SECONDS, 0)
    assert not devices_of(plan, ACTOR_GENERATION) & devices_of(plan, *others(plan))
    assert len(plan.groups) >= 2


@pytest.mark.parametrize("solver", DISAGGREGATED)
def test_longer_responses_get_more_gpus_for_generation(solver: str) -> None:
    jobs = (replace(workload(mode="async", response=tokens), samples=512) for tokens in (16, 4096))
    plans = [solve(Problem(one_site(nodes=3), job), solver, BUDGET_SECONDS, 0) for job in jobs]
    few, many = (len(devices_of(plan, ACTOR_GENERATION)) for plan in plans)
    assert few < many


def test_streamrl_keeps_the_cut_that_balances_its_stages() -> None:
    job = workload(mode="async")
    plan = solve(Problem(one_site(nodes=4), job), "streamrl", BUDGET_SECONDS, 0)
    trainer = len(devices_of(plan, ACTOR_TRAINING))
    slower = max(plan.predicted.tasks[ACTOR_GENERATION], sum(plan.predicted.tasks[name] for name in others(plan)))
    nodes = uniform.by_node(one_site(nodes=4).devices)
    parts = uniform.pieces(nodes)
    for cut in range(1, len(parts)):
        sides = (uniform.by_node(d for part in side for d in part) for side in (parts[:cut], parts[cut:]))
        first, second = sides
        placed = {name: second if name == ACTOR_GENERATION else first for name in job.tasks}
        trial = uniform.tuned(Problem(one_site(nodes=4), job), placed, Made("trial", 0, {})).plan
        if trial is not None and len(devices_of(trial, ACTOR_TRAINING)) != trainer:
            stages = (trial.predicted.tasks[ACTOR_GENERATION], sum(trial.predicted.tasks[n] for n in others(trial)))
            assert slower <= max(stages) * 1.05  # the cut is chosen by plainer trials than the plan's


def test_few_nodes_are_divided_and_many_are_not() -> None:
    nodes = uniform.by_node(one_site(nodes=1).devices)
    assert [len(piece) for piece in uniform.pieces(nodes)] == [1] * 8
    assert uniform.pieces(uniform.by_node(one_site(nodes=9).devices)) == uniform.by_node(one_site(nodes=9).devices)
    uneven = uniform.by_node(Topology((Site("s", (Node("n", "l4", 3),)),)).devices)
    assert sum(uniform.pieces(uneven), ()) == sum(uneven, ())


def test_areal_hex_gives_faster_gpus_more_layers_or_samples() -> None:
    nodes = uniform.by_node(two_sites().devices)
    problem = Problem(two_sites(), workload("qwen3-4b"))
    staged = uniform.training_layout(ACTOR_TRAINING, nodes, 4, 2, ("stages", "none", 1, "full"), problem)
    assert staged is not None
    uneven = by_speed(ACTOR_TRAINING, staged, problem)
    assert uneven is not None
    first, second = (stage.layers[1] - stage.layers[0] for stage in uneven.replicas[0].stages)
    assert site_of(uneven.replicas[0].devices[0]) == "fast"
    assert first > second
    small = Problem(two_sites(), workload("qwen3-0.6b"))
    flat = uniform.training_layout(ACTOR_TRAINING, nodes, 4, 1, ("stages", "data_parallel", 1, "full"), small)
    assert flat is not None
    dealt = by_speed(ACTOR_TRAINING, flat, small)
    assert dealt is not None
    assert [site_of(replica.devices[0]) for replica in dealt.replicas] == ["fast", "fast", "slow", "slow"]
    assert dealt.replicas[0].samples == dealt.replicas[1].samples > dealt.replicas[2].samples
    assert sum(replica.samples for replica in dealt.replicas) == 64


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=6), st.integers(1, 40), st.sampled_from([1, 2, 8]))
def test_samples_are_dealt_out_whole_and_no_move_of_a_unit_helps(rate: list[float], units: int, unit: int) -> None:
    shares = samples_by_rate(rate, units * unit, unit)
    assert sum(shares) == units * unit
    assert all(share % unit == 0 for share in shares)
    last = max(share / own for share, own in zip(shares, rate, strict=True))
    slowest = [i for i, share in enumerate(shares) if share / rate[i] > last * (1 - 1e-9)]
    if len(slowest) == 1:
        elsewhere = [(shares[i] + unit) / rate[i] for i in range(len(rate)) if i not in slowest]
        assert all(later >= last * (1 - 1e-6) for later in elsewhere)


def _pool(gpus: int, size: int = 2) -> Pool:
    devices = [Device("s", f"n{node}", index, "l4") for node in range(gpus // size) for index in range(size)]
    return Pool(uniform.by_node(devices), True, True)


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2), st.floats(1, 100)), min_size=1, max_size=4),
    st.lists(st.tuples(st.integers(0, 1), st.sampled_from([1, 2]), st.floats(0.1, 5)), min_size=1, max_size=3),
)
def test_the_milp_finds_what_trying_everything_finds(
    strategies: list[tuple[int, int, float]], kinds: list[tuple[int, int, float]]
) -> None:
    pools = [_pool(4), _pool(4)]
    columns = [Column((a, b), {}, seconds) for a, b, seconds in strategies]
    rollouts = [Rollout(pool, tensor, rate) for pool, tensor, rate in kinds]
    best = 0.0
    for column, numbers in product(columns, product(range(5), repeat=len(rollouts))):
        taken = [2 * n for n in column.counts]
        for kind, number in zip(rollouts, numbers, strict=True):
            taken[kind.pool] += kind.tensor * number
        if max(taken) <= 4:
            serving = sum(n * kind.rate for n, kind in zip(numbers, rollouts, strict=True)) / 10
            best = max(best, min(1 / column.seconds, serving))
    chosen = choose(columns, rollouts, pools, 10)
    if best == 0:
        assert chosen is None
        return
    assert chosen is not None
    column, numbers = chosen
    serving = sum(n * kind.rate for n, kind in zip(numbers, rollouts, strict=True)) / 10
    assert min(1 / column.seconds, serving) == pytest.approx(best, rel=0.01)  # spare rollouts count a little


@pytest.mark.parametrize("solver", SYSTEMS)
def test_each_task_stays_where_its_engine_is(solver: str) -> None:
    sites = (
        Site("alpha", (Node("a0", "a100-80gb", 4),), engines=("megatron",)),
        *(Site(name, (Node(f"{name}0", "l40s", 2),), engines=("vllm",)) for name in ("beta", "gamma")),
    )
    pairs = [("alpha", "beta"), ("alpha", "gamma"), ("beta", "gamma")]
    topology = Topology(sites, tuple(Link(pair, 1.0, 10) for pair in pairs))
    plan = solve(Problem(topology, workload()), solver, BUDGET_SECONDS, 0)
    assert {site_of(d) for d in devices_of(plan, *others(plan))} == {"alpha"}
    assert {site_of(d) for d in devices_of(plan, ACTOR_GENERATION)} <= {"beta", "gamma"}


@pytest.mark.parametrize("solver", SYSTEMS)
def test_one_gpu_for_each_engine_is_enough(solver: str) -> None:
    sites = tuple(Site(name, (Node("n0", "l40s", 1),), engines=(engine,)) for name, engine in ENGINE_SITES)
    topology = Topology(sites, (Link(("alpha", "beta"), 1.0, 10),))
    plan = solve(Problem(topology, workload("qwen3-0.6b")), solver, BUDGET_SECONDS, 0)
    assert set(devices_of(plan, ACTOR_GENERATION)) == {"beta/n0/0"}
    assert set(devices_of(plan, *others(plan))) == {"alpha/n0/0"}


@pytest.mark.parametrize("solver", SYSTEMS)
def test_sites_without_a_link_are_not_joined(solver: str) -> None:
    plan = solve(Problem(Topology(two_sites().sites), workload(mode="async")), solver, BUDGET_SECONDS, 0)
    assert plan.site_order == ("fast",)


@pytest.mark.parametrize("solver", SYSTEMS)
def test_engines_at_sites_without_a_link_make_no_plan(solver: str) -> None:
    sites = (
        Site("alpha", (Node("a0", "a100-80gb", 4),), engines=("megatron",)),
        Site("beta", (Node("b0", "l40s", 2),), engines=("vllm",)),
    )
    with pytest.raises(InfeasibleError, match="actor_generation can be at beta, which no link joins with alpha"):
        solve(Problem(Topology(sites), workload()), solver, BUDGET_SECONDS, 0)


@pytest.mark.parametrize(
    ("solver", "message"),
    [
        ("verl", "verl: no uniform layout of all tasks fits"),
        ("verl-expert", "verl-expert: no uniform layout"),
        ("streamrl", "streamrl: no division of the GPUs"),
        ("areal-hex", "areal-hex: no division of the GPUs"),
    ],
)
def test_what_does_not_fit_is_refused_with_a_way_out(solver: str, message: str) -> None:
    topology = Topology((Site("s", (Node("n0", "l4", 1, host_memory_gb=1), Node("n1", "l4", 1, host_memory_gb=1))),))
    with pytest.raises(InfeasibleError, match=f"{message}.*sha-ea"):
        solve(Problem(topology, workload("qwen3-0.6b", algorithm="ppo", response=16384)), solver, 5.0, 0)


GPUS = ("a100-40gb", "a100-80gb", "l40s", "l4", "h100")
nodes = st.tuples(st.sampled_from(GPUS), st.sampled_from([1, 2, 3, 4, 8]), st.integers(1, 2))


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    sites = []
    for index in range(draw(st.integers(1, 3))):
        gpu, gpus, count = draw(nodes)
        sites.append(Site(f"s{index}", tuple(Node(f"n{number}", gpu, gpus) for number in range(count))))
    pairs = [(a.name, b.name) for position, a in enumerate(sites) for b in sites[position + 1 :]]
    links = [Link(pair, draw(st.floats(0.1, 60)), draw(st.floats(0.3, 10))) for pair in pairs if draw(st.booleans())]
    return Topology(tuple(sites), tuple(links))


@settings(max_examples=10)
@given(topologies(), st.sampled_from(["grpo", "ppo"]), st.sampled_from(["sync", "async"]))
def test_every_plan_of_every_baseline_passes_check(topology: Topology, algorithm: str, mode: str) -> None:
    problem = Problem(topology, workload("qwen3-0.6b", algorithm=algorithm, mode=mode))
    for solver in SYSTEMS:
        try:
            plan = solve(problem, solver, 1.0, 0)  # checks the plan itself
        except InfeasibleError as error:
            assert "sha-ea" in str(error) or "GB" in str(error)
            continue
        assert plan.predicted == predict(plan, CostModel(topology, problem.workload))
        used = Counter(node_of(device) for device in devices_of(plan))
        assert all(count <= topology.node_by_id[node].gpus for node, count in used.items())


def test_listed_nodes_are_those_of_the_file_in_its_order() -> None:
    problem = Problem(two_sites(), workload())
    found = uniform.listed_nodes(problem)
    assert set(found) == set(problem.workload.tasks)
    assert all(sum(nodes, ()) == problem.topology.devices for nodes in found.values())
