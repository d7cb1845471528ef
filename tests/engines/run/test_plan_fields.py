"""No field of a plan is silent: another value of it changes what is started, or the plan is refused."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

import pytest

from hetrl.cost.check import violations
from hetrl.errors import UsageError
from hetrl.plan import plan as plan_module
from hetrl.plan.plan import Group, Plan, Predicted, Replica, Solver, Stage, TaskPlan
from hetrl.problem import Problem, read_problem
from hetrl.runtime.run import engines
from hetrl.runtime.run.context import Context
from hetrl.runtime.run.rollout import settings_of
from hetrl.runtime.run.tasks import tasks_of
from hetrl.runtime.transport.member import Member
from hetrl.runtime.vllm.command import command_of, environment_of
from hetrl.search.assemble import Made, plan_of
from hetrl.workload import ACTOR_GENERATION, ACTOR_TRAINING, CRITIC_TRAINING, REFERENCE_INFERENCE
from lab.planned.random_plans import LAYERS, SAMPLES, write_experiment
from launch.render import commands, render
from launch.site_ways import links_of
from tests.plan.plan_changes import Change, algorithm, group, replicas, samples, task

# What a plan says to people: how it came about, and what is to be expected of it.
TOLD = ("inputs", *(f"solver.{one.name}" for one in dataclasses.fields(Solver)))
TOLD += tuple(f"predicted.{one.name}" for one in dataclasses.fields(Predicted))


@pytest.fixture(scope="module")
def problem(tmp_path_factory: pytest.TempPathFactory) -> Problem:
    return read_problem(write_experiment(tmp_path_factory.mktemp("experiment"), "sync"))


def stages(*devices: str) -> tuple[Stage, ...]:
    return (Stage(devices, (0, LAYERS)),)


def together(problem: Problem) -> Plan:
    """Everything on the two devices of alpha."""
    first, second = "alpha/alpha-0/0", "alpha/alpha-0/1"
    halves = tuple(Replica(SAMPLES // 2, stages(device)) for device in (first, second))
    servers = tuple(replace(one, kv_cache_gb=0.02, max_sequences=16) for one in halves)
    tasks = {
        ACTOR_TRAINING: TaskPlan("megatron", halves, micro_batch=2),
        REFERENCE_INFERENCE: TaskPlan("megatron", (Replica(SAMPLES, stages(first, second)),), micro_batch=2),
        ACTOR_GENERATION: TaskPlan("vllm", servers),
    }
    return plan_of(problem, [tasks], Made("hand", 0, {}))


def apart(problem: Problem) -> Plan:
    """Training at alpha, generation at beta and gamma, the reference beside it."""
    plan = together(problem)
    servers = tuple(Replica(SAMPLES // 2, stages(device), 0.02, 16) for device in ("beta/beta-0/0", "gamma/gamma-0/0"))
    alone = replace(plan.tasks[REFERENCE_INFERENCE], replicas=(Replica(SAMPLES, stages("beta/beta-0/1")),))
    tasks = {**plan.tasks, ACTOR_GENERATION: TaskPlan("vllm", servers), REFERENCE_INFERENCE: alone}
    return plan_of(problem, [{name: task} for name, task in tasks.items()], Made("hand", 0, {}))


def each(name: str, **changes: Any) -> Change:
    return replicas(name, lambda old: tuple(replace(one, **changes) for one in old))


def route(**changes: Any) -> Change:
    def change(plan: Plan) -> Plan:
        first, *others = plan.weight_sync.routes
        return replace(plan, weight_sync=replace(plan.weight_sync, routes=(replace(first, **changes), *others)))

    return change


PIPELINED = (Stage(("alpha/alpha-0/0",), (0, 1)), Stage(("alpha/alpha-0/1",), (1, LAYERS)))
RECOMPUTED = (Stage(("alpha/alpha-0/0", "alpha/alpha-0/1"), (0, LAYERS), recompute_layers=1),)
# Where a field is of no task in particular, every task that has a use for it is changed.
CHANGES: Mapping[str, tuple[tuple[Callable[[Problem], Plan], Change], ...]] = {
    "algorithm.kind": ((together, algorithm(kind="ppo")),),
    "algorithm.mode": ((together, algorithm(mode="async")),),
    "algorithm.max_staleness": ((together, algorithm(max_staleness=1)),),
    "algorithm.optimizer_steps_per_iteration": ((together, algorithm(optimizer_steps_per_iteration=2)),),
    "groups.tasks": (
        (together, lambda plan: replace(plan, groups=(Group((ACTOR_TRAINING,), plan.groups[0].devices),))),
    ),
    "groups.devices": ((apart, group(2, devices=("alpha/alpha-0/0",))),),
    "groups.job": tuple((apart, group(index, job=job)) for index, job in ((0, "gang"), (2, "array"))),
    "tasks.engine": tuple(
        (apart, task(name, engine=engine))
        for name, engine in ((ACTOR_TRAINING, "vllm"), (REFERENCE_INFERENCE, "vllm"), (ACTOR_GENERATION, "megatron"))
    ),
    "tasks.idle_state": (
        *((together, task(name, idle_state="offload")) for name in (ACTOR_TRAINING, REFERENCE_INFERENCE)),
        *((together, task(ACTOR_GENERATION, idle_state=state)) for state in ("sleep", "offload")),
        *((apart, task(name, idle_state="offload")) for name in (ACTOR_TRAINING, ACTOR_GENERATION)),
    ),
    "tasks.micro_batch": tuple(
        (together, task(name, micro_batch=4)) for name in (ACTOR_TRAINING, REFERENCE_INFERENCE, ACTOR_GENERATION)
    ),
    "tasks.recompute": tuple(
        (together, task(name, recompute=mode))
        for name in (ACTOR_TRAINING, REFERENCE_INFERENCE, ACTOR_GENERATION)
        for mode in ("selective", "full")
    ),
    "tasks.gradient_dtype": tuple(
        (together, task(name, gradient_dtype="bf16")) for name in (ACTOR_TRAINING, REFERENCE_INFERENCE)
    ),
    "tasks.optimizer_sharding": tuple(
        (together, task(name, optimizer_sharding="data_parallel")) for name in (ACTOR_TRAINING, REFERENCE_INFERENCE)
    ),
    "tasks.replicas.samples": tuple(
        (together, samples(name, SAMPLES // 4, 3 * SAMPLES // 4)) for name in (ACTOR_TRAINING, ACTOR_GENERATION)
    ),
    "tasks.replicas.kv_cache_gb": tuple(
        (together, each(name, kv_cache_gb=0.03)) for name in (ACTOR_GENERATION, ACTOR_TRAINING)
    ),
    "tasks.replicas.max_sequences": tuple(
        (together, each(name, max_sequences=8)) for name in (ACTOR_GENERATION, REFERENCE_INFERENCE)
    ),
    "tasks.replicas.stages.devices": (
        (apart, replicas(ACTOR_TRAINING, lambda old: (old[0], replace(old[1], stages=stages("gamma/gamma-1/0"))))),
        (apart, replicas(ACTOR_GENERATION, lambda old: (old[0], replace(old[1], stages=stages("beta/beta-0/0"))))),
    ),
    "tasks.replicas.stages.recompute_layers": tuple(
        (together, task(name, recompute=recompute, replicas=(Replica(SAMPLES, RECOMPUTED, *server),)))
        for name, recompute, server in (
            (ACTOR_TRAINING, "full", ()),
            (ACTOR_TRAINING, "none", ()),
            (REFERENCE_INFERENCE, "none", ()),
            (ACTOR_GENERATION, "none", (0.02, 16)),
        )
    ),
    "tasks.replicas.stages.layers": tuple(
        (together, task(name, replicas=(Replica(SAMPLES, PIPELINED, *server),)))
        for name, server in ((ACTOR_TRAINING, ()), (REFERENCE_INFERENCE, ()), (ACTOR_GENERATION, (0.02, 16)))
    ),
    "weight_sync.encoding": ((apart, lambda p: replace(p, weight_sync=replace(p.weight_sync, encoding="full"))),),
    "weight_sync.routes.model": ((apart, route(model=CRITIC_TRAINING)),),
    "weight_sync.routes.source": ((apart, route(source="gamma")),),
    "weight_sync.routes.target": ((apart, route(target="alpha")),),
    "weight_sync.routes.streams": ((apart, route(streams=8)),),
    "site_order": ((apart, lambda plan: replace(plan, site_order=plan.site_order[::-1])),),
}


def paths(kind: Any, prefix: str = "") -> Iterator[str]:
    """Yield every field below a type, with dots between; containers count for nothing."""
    if dataclasses.is_dataclass(kind):
        for name, inner in typing.get_type_hints(kind, vars(plan_module)).items():
            if name in {one.name for one in dataclasses.fields(kind)}:
                yield from paths(inner, f"{prefix}.{name}" if prefix else name)
        return
    inside = [one for one in typing.get_args(kind) if dataclasses.is_dataclass(one)]
    if inside and typing.get_origin(kind) is not types.UnionType:
        yield from paths(inside[0], prefix)
    else:
        yield prefix


def test_every_field_is_told_or_acts() -> None:
    assert sorted(paths(Plan)) == sorted([*CHANGES, *TOLD])


class Built:
    """In the engine's place: notes how it is built."""

    def __init__(self, _: Any, layout: Any, **how: Any) -> None:
        self.how = {"layout": asdict(layout), **{key: str(value) for key, value in how.items()}}

    def load(self, _: Any) -> None:
        """Take nothing."""


def outcome(plan: Plan, problem: Problem, directory: Path) -> Any:
    """Return why a plan is refused, or all that its processes are started with."""
    if found := violations(plan, problem.model):
        return "\n".join(found)
    gpus = {device.id: device.gpu for device in problem.topology.devices}
    try:
        jobs = commands(render(plan, gpus), "run", gpus, dict.fromkeys(plan.site_order, ()))
    except UsageError as error:
        return str(error)
    context = Context(directory, "run", plan.lead_site, plan.lead_site, "", gpus, {}, problem.experiment, plan)
    worlds = [world for name in plan.tasks if name != ACTOR_GENERATION for world in context.worlds(name)]
    servers = [settings_of(context, n, directory) for n in range(len(plan.tasks[ACTOR_GENERATION].replicas))]
    files = [site for site in problem.scenario.sites if site.name in plan.site_order]
    return {
        "jobs": [(job.site, job.name, [command.to_json() for command in job.tasks]) for job in jobs],
        "worlds": [(world.ranks, engines.build_engine(context, world, 0).how) for world in worlds],
        "servers": [(command_of(one, directory), environment_of(one, directory)) for one in servers],
        "turns": context.shared_groups,
        "trainers": [tasks_of(context, cast(Member, None)).actor.encoding],
        "shares": {name: [one.samples for one in task.replicas] for name, task in plan.tasks.items()},
        "links": links_of(files, {one: f"tcp://{one}:1" for one in plan.site_order}, plan.weight_sync.routes),
    }


@pytest.mark.parametrize("path", CHANGES)
def test_another_value_acts_or_is_refused(
    path: str, problem: Problem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "MegatronEngine", Built)
    for make, change in CHANGES[path]:
        before = outcome(make(problem), problem, tmp_path)
        assert isinstance(before, dict)
        assert outcome(change(make(problem)), problem, tmp_path) != before
