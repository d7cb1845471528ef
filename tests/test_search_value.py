"""The compiled evaluation against the cost model: what it says of a vector is what `predict` says of its plan."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hetrl.check import violations
from hetrl.cost.efficiency import rates
from hetrl.hardware import Link, Node, Site, Topology
from hetrl.lengths import Lengths
from hetrl.search.assemble import Made
from hetrl.search.evaluate import Evaluator
from hetrl.search.space import Problem, Space
from hetrl.search.value import VALUED, value
from hetrl.workload import Workload, architecture

pytestmark = pytest.mark.timeout(300)  # where nothing is compiled yet, the first test waits for that

MADE = Made("test", 0, {})
GPUS = ("a100-80gb", "a100-40gb", "l40s", "h100")


def job(model: str = "qwen3-1.7b", algorithm: str = "ppo", staleness: int = 0, kind: str = "fixed") -> Workload:
    size = architecture(model)
    return Workload(
        algorithm=algorithm,
        mode="async" if staleness else "sync",
        max_staleness=staleness,
        samples=128,
        samples_per_prompt=4,
        prompt_tokens=256,
        response=Lengths(256, 256) if kind == "fixed" else Lengths(256, 768, kind),
        optimizer_steps_per_iteration=2,
        actor=size,
        critic=size if algorithm == "ppo" else None,
        reference=size,
        reward=size,
    )


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    sites = []
    for index in range(draw(st.integers(1, 4))):
        gpu, gpus = draw(st.sampled_from(GPUS)), draw(st.sampled_from([2, 3, 4, 8]))
        nodes = [
            Node(
                f"n{number}",
                gpu,
                gpus,
                nic_gbps=draw(st.sampled_from([25.0, 100.0, 400.0])),
                host_memory_gb=draw(st.sampled_from([256.0, 2048.0])),
                wan_gbps=draw(st.sampled_from([None, 2.0])),
            )
            for number in range(draw(st.integers(1, 3)))
        ]
        sites.append(Site(f"s{index}", tuple(nodes), delay_ms=draw(st.sampled_from([0.05, 0.5]))))
    names = [site.name for site in sites]
    pairs = [(a, b) for position, a in enumerate(names) for b in names[position + 1 :]]
    return Topology(tuple(sites), tuple(Link(p, draw(st.floats(1, 60)), draw(st.floats(0.3, 10))) for p in pairs))


jobs = st.builds(
    job,
    st.sampled_from(["qwen3-0.6b", "qwen3-1.7b"]),
    st.sampled_from(["ppo", "grpo"]),
    st.sampled_from([0, 1, 3]),
    st.sampled_from(["fixed", "uniform"]),
)
seeds = st.integers(0, 2**31)


def feasible(evaluator: Evaluator, seed: int) -> np.ndarray:
    """A random vector, changed at random until it is feasible; skips the example if that takes long."""
    best = evaluator.random(seed)
    for step in range(300):
        if evaluator.parts(best)[0] < np.inf:
            break
        child = evaluator.mutate(best, seed + step)
        best = child if evaluator.graded(child) <= evaluator.graded(best) else best
    assume(evaluator.parts(best)[0] < np.inf)
    for step in range(seed % 20):  # and some way on, so that not all are what draws give
        child = evaluator.mutate(best, seed - step)
        best = child if evaluator.parts(child)[0] < np.inf else best
    return best


@settings(max_examples=150)
@given(topologies(), jobs, seeds)
def test_seconds_are_those_that_the_cost_model_predicts(topology: Topology, workload: Workload, seed: int) -> None:
    evaluator = Evaluator(Space(Problem(topology, workload)))
    x = feasible(evaluator, seed)
    seconds, parts = evaluator.parts(x)
    told = dict(zip(workload.tasks, parts.seconds.tolist(), strict=True))
    plan = evaluator.assemble(x, MADE)
    assert violations(plan, topology, workload) == []
    assert plan.predicted.iteration_seconds == pytest.approx(seconds, rel=1e-9)
    if len([group for group in plan.groups if "training" in "".join(group.tasks)]) == 1:  # else they may share links
        assert told == pytest.approx({name: plan.predicted.tasks[name] for name in workload.tasks}, rel=1e-9)


@settings(max_examples=60)
@given(topologies(), jobs, seeds)
def test_memory_is_never_less_than_what_the_plan_needs(topology: Topology, workload: Workload, seed: int) -> None:
    evaluator = Evaluator(Space(Problem(topology, workload)))
    x = feasible(evaluator, seed)
    parts = evaluator.parts(x)[1]
    resident, peak, runs = parts.resident_gb.copy(), parts.peak_gb.copy(), parts.runs.copy()
    plan = evaluator.assemble(x, MADE)
    kind_of = {d.id: k for k, nodes in enumerate(evaluator.space.nodes) for node in nodes for d in node}
    for group in plan.groups:
        tasks = [workload.tasks.index(name) for name in group.tasks]
        for kind in {kind_of[device] for device in group.devices}:
            here = [task for task in tasks if runs[task, kind]]
            bound = max(peak[t, kind] + sum(resident[u, kind] for u in here if u != t) for t in here)
            needed = max(plan.predicted.peak_memory_gb[d] for d in group.devices if kind_of[d] == kind)
            assert needed <= bound * (1 + 1e-9) <= rates(evaluator.space.classes[kind].gpu).usable_gb * (1 + 2e-9)
            if len(here) == 1:
                assert needed == pytest.approx(bound, rel=1e-9)


@settings(max_examples=60)
@given(topologies(), jobs, seeds)
def test_what_a_change_did_not_touch_need_not_be_valued_again(
    topology: Topology, workload: Workload, seed: int
) -> None:
    from hetrl.search.chance import seeded
    from hetrl.search.mutate import mutate

    evaluator = Evaluator(Space(Problem(topology, workload)))
    x = evaluator.random(seed)
    evaluator.graded(x)
    state, tables = seeded(seed), evaluator.bench.pointers[0]
    for _ in range(20):
        stale = np.zeros(len(workload.tasks), np.bool_)
        mutate(x, stale, state, tables)
        while (row := value(x, stale, *evaluator.bench.pointers)) != VALUED:
            evaluator.rows.fill(evaluator.tables.serving, row)
        incremental = float(evaluator.bench.room.result[0])
        parts = evaluator.bench.parts.floats.copy()
        assert incremental == evaluator.graded(x)
        assert np.array_equal(parts, evaluator.bench.parts.floats)


@settings(max_examples=100)
@given(st.data(), seeds)
def test_any_vector_is_repaired_once_and_for_all(data: st.DataObject, seed: int) -> None:
    topology = data.draw(topologies())
    evaluator = Evaluator(Space(Problem(topology, job())))
    genes = st.integers(-3, 40)
    x = np.array(data.draw(st.lists(genes, min_size=evaluator.size, max_size=evaluator.size)), np.int32)
    evaluator.repair(x)
    again = x.copy()
    evaluator.repair(again)
    assert np.array_equal(x, again)
    low, high = evaluator.bounds
    assert (low <= x).all() and (x <= high).all()
    drawn = evaluator.random(seed)
    again = drawn.copy()
    evaluator.repair(again)
    assert np.array_equal(drawn, again)
    changed = evaluator.mutate(drawn, seed)
    again = changed.copy()
    evaluator.repair(again)
    assert np.array_equal(changed, again)


@settings(max_examples=30)
@given(topologies(), jobs, seeds)
def test_names_and_order_of_equal_nodes_do_not_matter(topology: Topology, workload: Workload, seed: int) -> None:
    def renamed(site: Site) -> Site:
        return replace(site, nodes=tuple(replace(node, name=f"other-{node.name}") for node in site.nodes))

    other = Topology(tuple(map(renamed, topology.sites)), topology.links)
    evaluators = [Evaluator(Space(Problem(some, workload))) for some in (topology, other)]
    x = feasible(evaluators[0], seed)
    assert evaluators[0].parts(x)[0] == evaluators[1].parts(x)[0]
    plans = [evaluator.assemble(x, MADE) for evaluator in evaluators]
    assert plans[0].predicted.iteration_seconds == plans[1].predicted.iteration_seconds


def test_a_plan_that_is_met_again_does_not_count() -> None:
    topology = Topology((Site("a", (Node("n", "a100-80gb", 4),)),))
    evaluator = Evaluator(Space(Problem(topology, job(algorithm="grpo"))))
    x = evaluator.random(1)
    evaluator.seconds(np.stack([x, x, evaluator.random(2)]))
    assert evaluator.evaluations == 2


def test_work_per_plan_grows_with_classes_and_not_with_gpus() -> None:
    sizes = []
    for nodes in (2, 512):
        topology = Topology((Site("a", tuple(Node(f"n{index}", "a100-80gb", 8) for index in range(nodes))),))
        evaluator = Evaluator(Space(Problem(topology, job())))
        sizes.append((evaluator.size, evaluator.bench.parts.floats.size, evaluator.bench.room.columns.kind.shape))
    assert sizes[0] == sizes[1]
