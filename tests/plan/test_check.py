"""Each constraint but memory's: the base plan passes; a plan that breaks one rule is told of that rule alone.

`tests/cost/test_memory_check.py` has those of memory.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hetrl.hardware import Link, Topology
from hetrl.plan.check import violations
from hetrl.plan.check_sites import site_violations
from hetrl.plan.plan import Group, Plan, Replica, Route, Stage
from tests.plan.plan_cases import FIRST, OTHER_FIRST, OTHER_SECOND, SECOND, plan, topology, workload
from tests.plan.plan_changes import Change, algorithm, both, group, replicas, samples, task

TRAINING, GENERATION = "actor_training", "actor_generation"
CRITICS = Route("alps", "jsc", model="critic")
REFERENCE, REWARD = "reference_inference", "reward_inference"


def one_replica(name: str, *stages: tuple[tuple[str, ...], tuple[int, int]]) -> Change:
    has = (1.0, 8) if name == GENERATION else (0.0, 0)
    return task(name, replicas=(Replica(64, tuple(Stage(devices, layers) for devices, layers in stages), *has),))


def server(name: str, index: int, **changes: Any) -> Change:
    return replicas(name, lambda old: (*old[:index], replace(old[index], **changes), *old[index + 1 :]))


def routes(*pairs: tuple[str, str], streams: int = 1) -> Change:
    return lambda p: replace(
        p, weight_sync=replace(p.weight_sync, routes=tuple(Route(a, b, streams) for a, b in pairs))
    )


def site_order(*names: str) -> Change:
    return lambda p: replace(p, site_order=names)


def no_task(name: str) -> Change:
    return lambda p: replace(
        p,
        tasks={key: value for key, value in p.tasks.items() if key != name},
        groups=tuple(g for g in p.groups if name not in g.tasks),
    )


def extra_task(p: Plan) -> Plan:
    tasks = {**p.tasks, "critic_training": replace(p.tasks[TRAINING])}
    return group(0, tasks=(*p.groups[0].tasks, "critic_training"))(replace(p, tasks=tasks))


def wide_rollout(p: Plan) -> Plan:
    """One generation replica of two stages, one on each node of jsc."""
    devices = ("jsc/l40s-1/0", "jsc/l40s-0/0")
    p = one_replica(GENERATION, ((devices[0],), (0, 14)), ((devices[1],), (14, 28)))(p)
    p = routes(("alps", "jsc"))(one_replica(REWARD, (("lab/l4-0/0",), (0, 28)))(p))
    return replace(p, groups=(p.groups[0], Group((GENERATION,), devices, "array"), Group((REWARD,), ("lab/l4-0/0",))))


def uneven_stages(p: Plan) -> Plan:
    """One reference replica whose stages have one and two devices."""
    return one_replica(REFERENCE, (FIRST[:1], (0, 14)), (SECOND, (14, 28)))(p)


def recomputed(layers: int) -> Change:
    """Two stages of 14 layers, of which the second computes so many again."""
    stages = (Stage(FIRST, (0, 14)), Stage(SECOND, (14, 28), layers))
    return replicas(TRAINING, lambda old: (replace(old[0], stages=stages), *old[1:]))


def unequal_split(p: Plan) -> Plan:
    stages = (Stage(OTHER_FIRST, (0, 12)), Stage(OTHER_SECOND, (12, 28)))
    return replicas(TRAINING, lambda old: (old[0], Replica(24, stages)))(p)


def unequal_tp(p: Plan) -> Plan:
    stages = (Stage(OTHER_FIRST, (0, 14)), Stage(OTHER_SECOND[:1], (14, 28)))
    return replicas(TRAINING, lambda old: (old[0], Replica(24, stages)))(p)


GENERATION_ON_ALPS = both(
    one_replica(GENERATION, (FIRST, (0, 28))),
    lambda p: replace(p, groups=(replace(p.groups[0], tasks=(*p.groups[0].tasks, GENERATION)), p.groups[2])),
    site_order("alps", "jsc"),
    routes(),
)

BROKEN: dict[str, tuple[Change, tuple[str, ...]]] = {
    "a task is missing": (no_task(REWARD), (REWARD, "the workload has this task")),
    "a task too many": (extra_task, ("critic_training", "the workload does not")),
    "no replica": (task(REWARD, replicas=()), (REWARD, "no replica")),
    "no stage": (task(REWARD, replicas=(Replica(64, ()),)), (f"{REWARD}, replica 0", "no stage")),
    "no device": (one_replica(REWARD, ((), (0, 28))), (f"{REWARD}, replica 0, stage 0", "no device")),
    "unknown device of a task": (one_replica(REWARD, (("jsc/l40s-7/0",), (0, 28))), (REWARD, "no device jsc/l40s-7/0")),
    "unknown device of a group": (
        group(2, devices=("jsc/l40s-1/0", "jsc/l40s-1/9")),
        ("group 2", "no device jsc/l40s-1/9"),
    ),
    "task in no group": (group(0, tasks=(TRAINING,)), (REFERENCE, "is in 0 groups")),
    "task in two groups": (group(0, tasks=(TRAINING, REFERENCE, REFERENCE)), (REFERENCE, "is in 2 groups")),
    "unknown task in a group": (group(2, tasks=(REWARD, "critic_training")), ("critic_training", "does not have")),
    "device twice in a group": (group(2, devices=("jsc/l40s-1/0",) * 2), ("group 2", "jsc/l40s-1/0 twice")),
    "groups overlap": (
        group(2, devices=("jsc/l40s-1/0", "jsc/l40s-0/0")),
        ("group 2", "jsc/l40s-0/0 belongs to group 1"),
    ),
    "device outside the group": (group(2, devices=("jsc/l40s-1/1",)), (REWARD, "jsc/l40s-1/0", "group 2")),
    "device twice in a task": (
        replicas(REFERENCE, lambda old: (old[0], replace(old[1], stages=old[0].stages))),
        (REFERENCE, f"{FIRST[0]} twice", f"{FIRST[1]} twice"),
    ),
    "layers have a gap": (
        one_replica(TRAINING, (FIRST, (0, 14)), (SECOND, (15, 28))),
        (f"{TRAINING}, replica 0", "stage 0 ends before layer 14, stage 1 starts at 15"),
    ),
    "layers do not start at 0": (one_replica(REWARD, (("jsc/l40s-1/0",), (1, 28))), (REWARD, "[1, 28]", "[0, 28]")),
    "layers do not end": (one_replica(REWARD, (("jsc/l40s-1/0",), (0, 27))), (REWARD, "[0, 27]", "[0, 28]")),
    "an empty stage": (
        one_replica(TRAINING, (FIRST, (0, 28)), (SECOND, (28, 28))),
        (f"{TRAINING}, replica 0, stage 1", "holds no layer"),
    ),
    "samples do not sum": (samples(REFERENCE, 32, 31), (REFERENCE, "sum to 63", "64")),
    "no sample": (samples(REFERENCE, 64, 0), (f"{REFERENCE}, replica 1", "0 samples")),
    "broken micro-batch": (samples(TRAINING, 39, 25), (f"{TRAINING}, replica 1", "25 samples", "micro_batch (2)")),
    "wrong engine": (task(REWARD, engine="vllm"), (REWARD, "runs on megatron, not on vllm")),
    "illegal idle state": (task(REFERENCE, idle_state="nap"), (REFERENCE, 'resident, offload, sleep, not "nap"')),
    "a task alone that offloads": (task(REWARD, idle_state="offload"), (REWARD, "no other task has a turn")),
    "generation with micro-batches": (task(GENERATION, micro_batch=2), (GENERATION, "micro_batch is 2", "no use")),
    "scoring recomputes": (task(REFERENCE, recompute="full"), (REFERENCE, "recompute is full", "take none")),
    "scoring has gradients": (task(REFERENCE, gradient_dtype="bf16"), (REFERENCE, "gradient_dtype is bf16", "fp32")),
    "scoring has an optimiser": (
        task(REFERENCE, optimizer_sharding="data_parallel"),
        (REFERENCE, "optimizer_sharding is data_parallel", "take none"),
    ),
    "training sleeps": (task(TRAINING, idle_state="sleep"), (TRAINING, "KV cache")),
    "more recomputed layers than a stage has": (
        recomputed(15),
        (f"{TRAINING}, replica 0, stage 1", "recompute_layers is 15; the stage has 14 layers"),
    ),
    "fewer recomputed layers than none": (
        recomputed(-1),
        (f"{TRAINING}, replica 0, stage 1", "recompute_layers is -1"),
    ),
    "recomputed layers of a selective recomputation": (
        both(task(TRAINING, recompute="selective"), recomputed(3)),
        (f"{TRAINING}, replica 0, stage 1", "recompute is selective, not full"),
    ),
    "illegal recompute": (task(TRAINING, recompute="half"), (TRAINING, "recompute", "half")),
    "illegal gradient dtype": (task(TRAINING, gradient_dtype="fp8"), (TRAINING, "gradient_dtype", "fp8")),
    "illegal sharding": (task(TRAINING, optimizer_sharding="all"), (TRAINING, "optimizer_sharding", "all")),
    "micro-batch of none": (task(TRAINING, micro_batch=0), (TRAINING, "micro_batch is 0")),
    "negative cache": (server(GENERATION, 2, kv_cache_gb=-1.0), (f"{GENERATION}, replica 2", "kv_cache_gb is -1.0")),
    "no cache": (server(GENERATION, 0, kv_cache_gb=0.0), (f"{GENERATION}, replica 0", "kv_cache_gb is 0.0")),
    "a cache of nan": (server(GENERATION, 0, kv_cache_gb=float("nan")), ("kv_cache_gb is nan",)),
    "no sequence": (server(GENERATION, 1, max_sequences=0), (f"{GENERATION}, replica 1", "max_sequences is 0")),
    "a trainer with a cache": (server(TRAINING, 1, kv_cache_gb=1.5), (f"{TRAINING}, replica 1", "kv_cache_gb is 1.5")),
    "sequences of an inference": (server(REWARD, 0, max_sequences=8), (f"{REWARD}, replica 0", "max_sequences is 8")),
    "rollout over two sites": (
        both(
            one_replica(GENERATION, (("jsc/l40s-0/0",), (0, 14)), (("lab/l4-0/0",), (14, 28))),
            group(1, job="gang"),
        ),
        (f"{GENERATION}, replica 0", "spans the sites jsc, lab"),
    ),
    "tensor parallelism over two nodes": (
        one_replica(REFERENCE, ((FIRST[0], OTHER_FIRST[0]), (0, 28))),
        (f"{REFERENCE}, replica 0, stage 0", "spans the nodes alps/a100-0, alps/a100-1"),
    ),
    "tensor parallelism and heads": (
        one_replica(REFERENCE, ((*FIRST, SECOND[0]), (0, 28))),
        (f"{REFERENCE}, replica 0, stage 0", "3 devices do not divide the 16 attention heads"),
    ),
    "two tensor parallelisms": (unequal_tp, (TRAINING, "1, 2 devices", "one tensor parallelism")),
    "two layer splits": (unequal_split, (f"{TRAINING}, replica 1", "[0, 12], [12, 28]", "[0, 14], [14, 28]")),
    "unknown job": (group(1, job="loose"), ("group 1", "loose")),
    "training in an array": (
        both(group(0, job="array"), one_replica(TRAINING, (FIRST, (0, 14)), (SECOND, (14, 28)))),
        ("group 0", f"alone; {TRAINING}, {REFERENCE} needs a gang"),
    ),
    "inference in an array": (group(2, job="array"), ("group 2", f"alone; {REWARD} needs a gang")),
    "inference of uneven stages": (uneven_stages, (f"{REFERENCE}, replica 0", "1, 2 devices", "one tensor")),
    "rollout over two nodes": (
        wide_rollout,
        (f"{GENERATION}, replica 0", "spans the nodes jsc/l40s-1, jsc/l40s-0", "vLLM server"),
    ),
    "site twice": (site_order("alps", "jsc", "jsc", "lab"), ("site_order", "jsc twice")),
    "site missing": (site_order("alps", "jsc"), ("site_order", "lacks the site lab")),
    "site unused": (site_order("alps", "jsc", "lab", "moon"), ("site_order", "moon", "does not use")),
    "wrong first site": (site_order("jsc", "alps", "lab"), ("site_order", "starts with jsc", "at alps")),
    "no route": (routes(("alps", "jsc")), ("weight_sync", "no route from alps", "to lab")),
    "route of no stream": (
        routes(("alps", "jsc"), ("alps", "lab"), streams=0),
        ("route alps -> jsc: has 0 streams", "route alps -> lab: has 0 streams"),
    ),
    "route of too many streams": (
        routes(("alps", "jsc"), ("alps", "lab"), streams=1_000_000),
        ("route alps -> jsc: has 1000000 streams; it takes 1 to 256",),
    ),
    "route twice": (
        routes(("alps", "jsc"), ("alps", "lab"), ("alps", "lab")),
        ("route alps -> lab", "is there 2 times"),
    ),
    "route to nowhere": (
        routes(("alps", "jsc"), ("alps", "lab"), ("jsc", "moon")),
        ("route jsc -> moon", "no link"),
    ),
    "route from where no weights are": (
        routes(("alps", "jsc"), ("alps", "lab"), ("jsc", "lab")),
        ("route jsc -> lab: actor_training sends from alps, actor_generation takes weights at jsc, lab",),
    ),
    "route to where nothing generates": (
        both(one_replica(GENERATION, (("lab/l4-0/0",), (0, 28))), routes(("alps", "jsc"), ("alps", "lab"))),
        ("route alps -> jsc: actor_training sends from alps, actor_generation takes weights at lab",),
    ),
    "route of a model that is not trained": (
        lambda p: replace(p, weight_sync=replace(p.weight_sync, routes=(*p.weight_sync.routes, CRITICS))),
        ("weight_sync, route alps -> jsc of the critic: the plan trains no critic",),
    ),
    "unknown encoding": (lambda p: replace(p, weight_sync=replace(p.weight_sync, encoding="zip")), ("encoding", "zip")),
    "algorithm kind": (algorithm(kind="ppo"), ("algorithm.kind", "ppo", "grpo")),
    "algorithm mode": (algorithm(mode="sync"), ("algorithm.mode", "sync", "async")),
    "algorithm staleness": (algorithm(max_staleness=1), ("algorithm.max_staleness", "says 1", "workload 2")),
    "algorithm steps": (algorithm(optimizer_steps_per_iteration=1), ("optimizer_steps_per_iteration", "says 1")),
}
LINES = {"device twice in a task": 2, "broken micro-batch": 2, "route of no stream": 2, "route of too many streams": 2}


def test_the_base_plan_passes() -> None:
    assert violations(plan(), topology(), workload()) == []


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_rule_is_the_only_one_reported(case: str) -> None:
    change, fragments = BROKEN[case]
    found = violations(change(plan()), topology(), workload())
    assert len(found) == LINES.get(case, 1), found
    assert all("\n" not in line for line in found)
    for fragment in fragments:
        assert fragment in "\n".join(found)


def test_all_violations_are_reported_at_once() -> None:
    broken = both(algorithm(kind="ppo"), samples(REFERENCE, 32, 31), routes(("alps", "jsc")))(plan())
    assert len(violations(broken, topology(), workload())) == 3


@pytest.mark.parametrize("change", [unequal_split, unequal_tp])
def test_relaxed_lifts_the_training_grid(change: Change) -> None:
    assert violations(change(plan()), topology(), workload(), relaxed=True) == []


def test_relaxed_keeps_every_other_rule() -> None:
    assert violations(samples(REFERENCE, 32, 31)(plan()), topology(), workload(), relaxed=True)


def test_generation_beside_the_trainer_needs_no_route() -> None:
    assert violations(GENERATION_ON_ALPS(plan()), topology(), workload()) == []


def test_gradients_in_bf16_are_for_models_in_bf16() -> None:
    change = task(TRAINING, gradient_dtype="bf16")
    assert violations(change(plan()), topology(), workload()) == []
    found = violations(change(plan()), topology(), replace(workload(), weight_bytes=4))
    assert found == ["actor_training: gradient_dtype is bf16, the model's dtype is not; take fp32"]


def test_an_engine_that_a_site_lacks() -> None:
    sites = tuple(replace(s, engines=("megatron",)) if s.name == "lab" else s for s in topology().sites)
    found = violations(plan(), Topology(sites, topology().links), workload())
    assert found == ["actor_generation: needs the engine vllm; the site lab has megatron"]


def linked(*links: Link) -> Topology:
    return Topology(topology().sites, links)


def test_a_site_without_a_link_to_the_controller() -> None:
    jsc_links = (Link(("jsc", "alps"), 1, 1), Link(("lab", "jsc"), 1, 1))
    found = violations(plan(), linked(*jsc_links), workload())
    assert found == [
        "weight_sync, route alps -> lab: the topology has no link between alps and lab",
        "site lab: has no link to alps, where the controller runs",
    ]
    assert violations(plan(), linked(*jsc_links, Link(("alps", "lab"), 1, 0)), workload()) == found


def test_training_over_sites_needs_each_pair_linked() -> None:
    stages = (Stage(FIRST[:1], (0, 10)), Stage(("jsc/l40s-1/1",), (10, 20)), Stage(("lab/l4-0/0",), (20, 28)))
    base = task(TRAINING, replicas=(Replica(64, stages),))(plan())
    groups = (
        Group((REFERENCE, TRAINING), (*FIRST, *OTHER_FIRST, "jsc/l40s-1/1", "lab/l4-0/0")),
        Group((GENERATION,), ("jsc/l40s-0/0", "jsc/l40s-0/1")),
        Group((REWARD,), ("jsc/l40s-1/0",)),
    )
    rollouts = tuple(replace(r, samples=32) for r in base.tasks[GENERATION].replicas[:2])
    spread = task(GENERATION, replicas=rollouts)(replace(base, groups=groups))
    spread = routes(("alps", "jsc"), ("lab", "jsc"))(spread)
    assert violations(spread, topology(), workload()) == []
    (line,) = violations(routes(("alps", "jsc"))(spread), topology(), workload())
    assert line == "weight_sync: no route from lab, where actor_training is, to jsc, where actor_generation is"
    without = linked(*(link for link in topology().links if set(link.between) != {"jsc", "lab"}))
    assert violations(spread, without, workload()) == [
        "weight_sync, route lab -> jsc: the topology has no link between lab and jsc",
        "actor_training: trains over jsc and lab, which have no link",
    ]


def test_vllm_has_each_key_value_head_on_as_many_devices() -> None:
    """It asserts that their number divides the tensor parallelism, or is divided by it."""
    on_two = replicas(GENERATION, lambda old: (replace(old[0], stages=(Stage(FIRST, (0, 28)),)),))(plan())
    for heads, legal in ((4, True), (2, True), (1, True), (3, False)):
        job = replace(workload(), actor=replace(workload().actor, heads=12, kv_heads=heads))
        lines = [line for line in violations(on_two, topology(), job) if line.startswith(GENERATION)]
        assert any("2 devices do not divide the" in line for line in lines) != legal


def test_megatron_splits_key_value_heads_and_vllm_replicates_them() -> None:
    one_head = replace(workload(), actor=replace(workload().actor, kv_heads=1))
    lines = [line for line in violations(plan(), topology(), one_head) if "heads" in line]
    assert lines
    for line in lines:
        assert line.startswith(f"{TRAINING}, ")
        assert line.endswith("2 devices do not divide the 1 key-value heads of qwen3-1.7b")


def test_the_critic_has_routes_of_its_own() -> None:
    whole = plan()
    tasks = {**whole.tasks, "critic_training": whole.tasks[TRAINING], "critic_inference": whole.tasks[GENERATION]}
    apart = replace(whole, tasks=tasks)
    missing = [*site_violations(apart, topology())]
    assert missing == [
        f"weight_sync: no route from alps, where critic_training is, to {site}, where critic_inference is"
        for site in ("jsc", "lab")
    ]
    both_routes = (*whole.weight_sync.routes, CRITICS, replace(CRITICS, target="lab"))
    assert not [
        *site_violations(replace(apart, weight_sync=replace(whole.weight_sync, routes=both_routes)), topology())
    ]
