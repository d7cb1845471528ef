"""Plans for sites with slices of GPUs (MIG): no solver puts two together, and they are of use for rollouts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from hetrl.cost.check import violations
from hetrl.errors import InfeasibleError
from hetrl.explanation.training_sites import training_sites
from hetrl.gpus import gpu_type
from hetrl.hardware import Link, Node, Site, Topology
from hetrl.plan.plan import Plan
from hetrl.problem import Problem
from hetrl.search import solve
from hetrl.search.core.tables_serving import serving_tables
from hetrl.search.evaluate import Evaluator
from hetrl.search.space import Space
from hetrl.workload import ACTOR_GENERATION, ACTOR_TRAINING, Lengths
from tests.search.ilp_cases import workload
from tests.search.search_cases import MADE, feasible, job, seeds

SLICES = ("a100-80gb-3g.40gb", "a100-80gb-1g.20gb", "h100-7g.80gb", "h200-2g.35gb")
BASELINES = ("verl", "verl-expert", "streamrl", "areal-hex")


@st.composite
def topologies(draw: st.DrawFn, all_linked: bool = True) -> Topology:
    """Draw one to three sites, the first with whole GPUs, each with some or with slices or with both."""
    sites = []
    for index in range(draw(st.integers(1, 3))):
        whole = draw(st.sampled_from([1, 2, 4])) if index == 0 else draw(st.sampled_from([0, 2]))
        gpu, gpus = draw(st.sampled_from(SLICES)), draw(st.integers(1, 7))
        nodes = [Node(f"mig-{number}", gpu, gpus) for number in range(draw(st.integers(0 if whole else 1, 2)))]
        nodes += [Node("whole", "a100-80gb", whole)] if whole else []
        sites.append(Site(f"s{index}", tuple(nodes)))
    pairs = [(a.name, b.name) for place, a in enumerate(sites) for b in sites[place + 1 :]]
    return Topology(tuple(sites), tuple(Link(pair, 5.0, 5.0) for pair in pairs if all_linked or draw(st.booleans())))


def one_site(*nodes: Node, engines: tuple[str, ...] = ("megatron", "vllm")) -> Topology:
    return Topology((Site("alps", nodes, engines=engines),))


def trainer_and_slices(gpus: int, slices: int, gpu: str = "a100-80gb-3g.40gb") -> Topology:
    """Return a site that trains on whole GPUs, and one that generates on slices."""
    trainer = Site("a", (Node("whole", "a100-80gb", gpus),), engines=("megatron",))
    rollouts = Site("b", (Node("mig", gpu, slices),), engines=("vllm",))
    return Topology((trainer, rollouts), (Link(("a", "b"), 5.0, 5.0),))


def sliced(plan: Plan, topology: Topology, *tasks: str) -> set[str]:
    """Return the slices that these tasks use, all without any."""
    devices = [device for name in tasks or plan.tasks for device in plan.tasks[name].devices]
    return {device for device in devices if topology.slice_of(topology.device_by_id[device])}


@settings(max_examples=25)
@given(topologies(), st.sampled_from(["ppo", "grpo"]), st.sampled_from([0, 1]), seeds)
def test_every_vector_decodes_to_a_plan_that_passes_check(
    topology: Topology, algorithm: str, staleness: int, seed: int
) -> None:
    problem = Problem(topology, job("qwen3-0.6b", algorithm, staleness))
    evaluator = Evaluator(Space(problem))
    plan = evaluator.assemble(feasible(evaluator, seed), MADE)
    assert violations(plan, problem.model) == []
    assert not sliced(plan, topology, *(name for name in plan.tasks if name.endswith("_training")))


@settings(max_examples=6)
@given(topologies(all_linked=False), st.sampled_from(["grpo", "ppo"]), st.sampled_from(["sync", "async"]))
def test_every_plan_of_every_solver_passes_check(topology: Topology, algorithm: str, mode: str) -> None:
    problem = Problem(topology, workload(algorithm, mode))
    for solver in ("sha-ea", "random", *BASELINES):
        try:
            bound = {"evaluations": 1000} if solver == "sha-ea" else {}
            plan = solve(problem, solver, 1.0, 0, **bound)  # checks the plan itself
        except InfeasibleError as error:
            assert solver in BASELINES or "too few" in str(error), error
            continue
        if solver in BASELINES:
            assert not sliced(plan, topology), solver


def test_the_integer_program_keeps_to_single_slices() -> None:
    topology = trainer_and_slices(2, 4)
    plan = solve(Problem(topology, workload("grpo", "sync")), "ilp", 20.0, 0)  # checks the plan itself
    assert len(sliced(plan, topology, ACTOR_GENERATION)) > 1
    assert not sliced(plan, topology, ACTOR_TRAINING)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_slices_beside_whole_gpus_generate(mode: str) -> None:
    whole = one_site(Node("whole", "a100-80gb", 2))
    topology = one_site(*whole.sites[0].nodes, *(Node(f"mig-{n}", "a100-80gb-3g.40gb", 8) for n in range(2)))
    asked = replace(workload("grpo", mode), samples=256)
    plan, before = (solve(Problem(t, asked), "sha-ea", 60.0, 0, evaluations=5000) for t in (topology, whole))
    assert len(sliced(plan, topology, ACTOR_GENERATION)) > 2
    assert not sliced(plan, topology, ACTOR_TRAINING)
    assert plan.predicted.iteration_seconds < before.predicted.iteration_seconds


def test_a_slice_is_one_replica_and_no_part_of_one() -> None:
    nodes = [Node("whole", "a100-80gb", 4), Node("mig", "a100-80gb-3g.40gb", 4), Node("mig-2", "a100-80gb-3g.40gb", 4)]
    space = Space(Problem(one_site(*nodes), workload("grpo", "sync")))
    tables, _ = serving_tables(space)
    generation, training = (space.problem.workload.tasks.index(name) for name in (ACTOR_GENERATION, ACTOR_TRAINING))
    assert tables.options[generation].tolist() == [3, 1]
    assert tables.tensor[generation, 1, 1] == tables.pipeline[generation, 1, 1] == 1
    usable = [[space.usable(name, kind) for kind in (0, 1)] for name in (ACTOR_GENERATION, ACTOR_TRAINING)]
    assert usable == [[True, True], [True, False]]
    assert tables.options[training].tolist() == [0, 0]


def test_a_model_too_large_for_a_slice_is_not_cut_over_several() -> None:
    """Whole GPUs take a pipeline or several nodes where nothing else fits; slices of the same memory do not."""
    whole, asked = gpu_type("a100-80gb-1g.20gb"), job("qwen2.5-14b", "grpo")
    equal = replace(whole, name="part", slice_of="")
    for described, options in ((equal, True), (replace(equal, slice_of="a100-80gb"), False)):
        parts = [Node(f"n{n}", "part", 2, described=described) for n in range(4)]
        space = Space(Problem(one_site(Node("whole", "a100-80gb", 8), *parts), asked))
        tables, _ = serving_tables(space)
        assert bool(tables.options[:, 1].any()) == options


def test_where_only_slices_are_the_refusal_says_so() -> None:
    topology = one_site(Node("mig", "a100-80gb-3g.40gb", 8))
    with pytest.raises(InfeasibleError, match=r"actor_training needs whole GPUs: slices .*\(alps: a100-80gb-3g.40gb\)"):
        solve(Problem(topology, workload("grpo", "sync")), "sha-ea", 1.0, 0)
    rollouts = Site("jsc", (Node("l4", "l4", 2),), engines=("vllm",))
    both = Topology((*topology.sites, rollouts), (Link(("alps", "jsc"), 5.0, 5.0),))
    with pytest.raises(InfeasibleError, match=r"needs whole GPUs: .* or install megatron where they are"):
        solve(Problem(both, workload("grpo", "sync")), "sha-ea", 1.0, 0)


@pytest.mark.parametrize("solver", BASELINES)
def test_a_baseline_without_whole_gpus_for_a_task_is_refused_and_not_wrong(solver: str) -> None:
    topology = trainer_and_slices(2, 8)
    with pytest.raises(InfeasibleError, match="sha-ea"):
        solve(Problem(topology, workload("grpo", "sync")), solver, 1.0, 0)
    plan = solve(Problem(topology, workload("grpo", "sync")), "sha-ea", 60.0, 0, evaluations=2000)
    assert sliced(plan, topology, ACTOR_GENERATION) == set(plan.tasks[ACTOR_GENERATION].devices)


def test_slices_are_not_added_up_for_one_server() -> None:
    topology = trainer_and_slices(16, 8, "a100-80gb-1g.20gb")
    with pytest.raises(
        InfeasibleError, match="weights needs 30 GB in one node, the largest has 18 GB .*add whole GPUs"
    ):
        solve(Problem(topology, job("qwen2.5-14b", "grpo")), "sha-ea", 1.0, 0)
    long = replace(job("qwen3-8b", "grpo"), response=Lengths(200_000, 200_000))
    with pytest.raises(InfeasibleError, match="on each of 1 x a100-80gb-1g.20gb, which have 18 GB"):
        solve(Problem(topology, long), "sha-ea", 1.0, 0)


def test_training_is_not_compared_over_slices() -> None:
    nodes = Node("whole", "a100-80gb", 2)
    topology = Topology(
        (Site("a", (nodes, Node("mig", "h200-3g.71gb", 8))), Site("b", (Node("mig", "h200-3g.71gb", 8),))),
        (Link(("a", "b"), 1.0, 50.0),),
    )
    problem = Problem(topology, workload("grpo", "sync"))
    plan = solve(problem, "sha-ea", 60.0, 0, evaluations=2000)
    found = training_sites(plan, problem.model)
    assert found is not None and found.two is None
    assert found.one is not None and found.one.sites == ("a",)
    assert np.prod([int(part) for part in found.one.parallelism.split("×")]) <= 2
