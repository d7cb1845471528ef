from __future__ import annotations

from dataclasses import asdict, replace
from math import inf

import pytest
from hypothesis import given, settings, strategies as st

from hetrl.cost.check import check
from hetrl.cost.iteration import task_cost
from hetrl.hardware import Link, Node, Site, Topology
from hetrl.plan.plan import Plan, TaskPlan, site_of
from hetrl.problem import Problem
from hetrl.search.assemble import Made
from hetrl.search.baselines import streamrl, uniform, verl
from hetrl.search.baselines.by_speed import samples_by_speed
from hetrl.search.baselines.definition import AS_SOLVED, Definition, in_one_place
from hetrl.search.baselines.memory import with_kv_cache
from hetrl.search.space import Space
from hetrl.workload import ACTOR_GENERATION, ACTOR_TRAINING, CRITIC_TRAINING, Lengths, Workload, architecture

SYSTEMS = {"verl": verl.plan, "streamrl": streamrl.plan}
BY_SPEED = Definition(shares="by-speed")


def problem(topology: Topology, algorithm: str = "grpo", mode: str = "sync", name: str = "qwen3-0.6b") -> Problem:
    model = architecture(name)
    critic = model if algorithm == "ppo" else None
    lengths = Lengths(256, 256)
    return Problem(
        topology, Workload(algorithm, mode, int(mode == "async"), 256, 8, 256, lengths, 2, model, critic, model, model)
    )


def three_sites(gbps: float = 5.0, nic_gbps: float = 100.0) -> Topology:
    """Fast GPUs at two sites, slow ones at a third."""
    kinds = {"a": "a100-80gb", "b": "l4", "c": "a100-80gb"}
    sites = tuple(
        Site(name, tuple(Node(node, gpu, 1, nic_gbps=nic_gbps) for node in ("n0", "n1"))) for name, gpu in kinds.items()
    )
    return Topology(sites, tuple(Link(pair, 10.0, gbps) for pair in (("a", "b"), ("a", "c"), ("b", "c"))))


def planned(system: str, asked: Problem, definition: Definition) -> Plan:
    plan, compared = SYSTEMS[system](Space(asked), inf, Made(system, 0, {}), definition)
    check(plan, asked.model)
    assert compared > 10
    return plan


def samples_by_site(task: TaskPlan) -> dict[str, set[int]]:
    found: dict[str, set[int]] = {}
    for replica in task.replicas:
        found.setdefault(site_of(replica.devices[0]), set()).add(replica.samples)
    return found


def test_the_solvers_are_the_definition_without_arguments() -> None:
    assert Definition("equal", sees_links=True, critic_apart=False, chosen_hosts=False) == AS_SOLVED


@pytest.mark.parametrize(
    ("definition", "system"),
    [
        (BY_SPEED, "verl"),
        (BY_SPEED, "streamrl"),
        (replace(BY_SPEED, sees_links=False), "streamrl"),
        (replace(BY_SPEED, critic_apart=True), "verl"),
        (replace(BY_SPEED, critic_apart=True), "streamrl"),
        (Definition(chosen_hosts=True), "streamrl"),
    ],
    ids=str,
)
def test_a_plan_of_every_definition_is_legal_and_takes_all_samples(definition: Definition, system: str) -> None:
    asked = problem(three_sites(), "ppo", "async" if system == "streamrl" else "sync")
    plan = planned(system, asked, definition)
    for task in plan.tasks.values():
        assert sum(replica.samples for replica in task.replicas) == asked.workload.samples


def test_by_speed_the_slow_gpus_of_verl_get_less_to_do_and_all_still_work() -> None:
    asked = problem(three_sites())
    equal, dealt = (planned("verl", asked, one) for one in (AS_SOLVED, BY_SPEED))
    assert dealt.predicted.iteration_seconds < equal.predicted.iteration_seconds
    assert set(dealt.devices) == {device.id for device in asked.topology.devices}
    shares = samples_by_site(dealt.tasks[ACTOR_GENERATION])
    assert max(shares["b"]) < min(shares["a"] | shares["c"])
    layers = {tuple(stage.layers for stage in replica.stages) for replica in dealt.tasks[ACTOR_TRAINING].replicas}
    assert len(layers) == 1  # and the pipelines are uniform


def generation(asked: Problem, tensor: int) -> TaskPlan:
    nodes = uniform.by_node(asked.topology.devices)
    (found,) = (t for t in uniform.generation_layouts(nodes, asked) if t.tensor_parallel == tensor)
    whole = with_kv_cache({ACTOR_GENERATION: found}, asked)
    assert whole is not None
    return whole[ACTOR_GENERATION]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.sampled_from(["a100-80gb", "l40s", "l4"]), min_size=1, max_size=4), st.integers(4, 32))
def test_no_prompt_dealt_elsewhere_makes_generation_end_earlier(gpus: list[str], prompts: int) -> None:
    nodes = tuple(Node(f"n{index}", gpu, 2) for index, gpu in enumerate(gpus))
    asked = problem(Topology((Site("s", nodes),)))
    asked = replace(asked, workload=replace(asked.workload, samples=8 * prompts))
    dealt = samples_by_speed(ACTOR_GENERATION, generation(asked, 2), asked)
    assert sum(replica.samples for replica in dealt.replicas) == 8 * prompts
    seconds = task_cost(ACTOR_GENERATION, dealt, asked.model).seconds
    for giver, taker in ((g, t) for g in range(len(gpus)) for t in range(len(gpus)) if g != t):
        samples = [replica.samples for replica in dealt.replicas]
        samples[giver] -= 8
        samples[taker] += 8
        if samples[giver] > 0:
            moved = tuple(replace(own, samples=count) for own, count in zip(dealt.replicas, samples, strict=True))
            other = task_cost(ACTOR_GENERATION, replace(dealt, replicas=moved), asked.model).seconds
            assert seconds <= other * (1 + 1e-9)


def test_in_one_place_no_link_is_slower_than_the_network_cards() -> None:
    sites = (
        Site(
            "a", (Node("n0", "l4", 4, nic_gbps=100.0, wan_gbps=1.0), Node("n1", "l4", 4, nic_gbps=100.0)), delay_ms=0.1
        ),
        Site("b", (Node("n0", "l4", 4, nic_gbps=50.0),)),
        Site("c", (Node("n0", "l4", 4),)),
    )
    topology = Topology(sites, (Link(("a", "b"), 20.0, 1.0), Link(("b", "c"), 20.0, 0.0)))
    near = in_one_place(problem(topology)).topology
    first, second, _ = (next(d for d in near.devices if d.site == name) for name in "abc")
    path = near.path(first, second)
    assert path is not None and (path.gbps, path.delay_ms) == (50.0, 0.1)
    assert near.link("a", "c") is None and not near.linked("b", "c")  # what is not linked stays apart
    assert near.devices == topology.devices


def test_streamrl_that_sees_no_links_divides_the_gpus_as_on_fast_ones() -> None:
    blind = replace(BY_SPEED, sees_links=False)

    def trainer(gbps: float, definition: Definition) -> set[str]:
        plan = planned("streamrl", problem(three_sites(gbps), mode="async"), definition)
        return set(plan.tasks[ACTOR_TRAINING].devices)

    assert trainer(0.05, blind) == trainer(400.0, blind) != trainer(0.05, BY_SPEED)


def test_the_critic_gets_half_of_the_nodes_or_of_the_only_one() -> None:
    asked = problem(three_sites(), "ppo")
    listed = uniform.listed_nodes(asked)
    found = uniform.critic_apart(listed, listed)
    assert found is not None
    whole = listed[ACTOR_TRAINING]
    for name, nodes in found.items():
        critics = name.startswith(("critic", "reward"))
        assert nodes == (whole[3:] if critics else whole[:3])
    one = uniform.listed_nodes(problem(Topology((Site("s", (Node("n0", "l4", 4),)),)), "ppo"))
    halved = uniform.critic_apart(one, one)
    assert halved is not None
    actor, critic = (set(sum(halved[name], ())) for name in (ACTOR_TRAINING, CRITIC_TRAINING))
    assert len(actor) == len(critic) == 2 and actor | critic == set(*one[ACTOR_TRAINING])
    single = {name: nodes[:1] for name, nodes in listed.items()}
    assert uniform.critic_apart(single, single) is None
    without = uniform.listed_nodes(problem(three_sites()))
    assert uniform.critic_apart(without, without) is None


def test_only_the_named_tasks_are_halved() -> None:
    listed = uniform.listed_nodes(problem(three_sites(), "ppo"))
    found = uniform.critic_apart(listed, [name for name in listed if name != ACTOR_GENERATION])
    assert found is not None and found[ACTOR_GENERATION] == listed[ACTOR_GENERATION]


@pytest.mark.parametrize(
    ("system", "mode", "gbps", "nic_gbps", "name"),
    [("verl", "sync", 0.3, 100.0, "qwen3-0.6b"), ("streamrl", "async", 5.0, 5.0, "qwen3-4b")],
)
def test_a_critic_on_its_own_gpus_is_taken_where_it_is_faster(
    system: str, mode: str, gbps: float, nic_gbps: float, name: str
) -> None:
    asked = problem(three_sites(gbps, nic_gbps), "ppo", mode, name)
    apart = planned(system, asked, replace(BY_SPEED, critic_apart=True))
    together = planned(system, asked, BY_SPEED)
    assert apart.predicted.iteration_seconds < together.predicted.iteration_seconds
    actor, critic = (set(apart.tasks[name].devices) for name in (ACTOR_TRAINING, CRITIC_TRAINING))
    assert not actor & critic
    assert set(together.tasks[ACTOR_TRAINING].devices) == set(together.tasks[CRITIC_TRAINING].devices)


def test_a_critic_that_is_slower_on_its_own_gpus_has_all() -> None:
    asked = problem(three_sites(5.0), "ppo", "async", "qwen3-1.7b")
    may, must_not = (planned("streamrl", asked, replace(BY_SPEED, critic_apart=one)) for one in (True, False))
    assert may.predicted.iteration_seconds == must_not.predicted.iteration_seconds


def test_streamrl_on_chosen_hosts_leaves_a_far_site_out() -> None:
    asked = problem(three_sites(0.3), mode="async")
    chosen, listed = (planned("streamrl", asked, one) for one in (Definition(chosen_hosts=True), AS_SOLVED))
    assert len(chosen.site_order) == 1
    assert len(listed.site_order) == 3
    assert chosen.predicted.iteration_seconds < listed.predicted.iteration_seconds


def test_a_definition_is_what_a_file_of_knobs_can_say() -> None:
    assert Definition(**asdict(BY_SPEED)) == BY_SPEED
