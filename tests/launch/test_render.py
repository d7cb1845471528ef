from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from hetrl.errors import UsageError
from hetrl.plan.plan import Group, Replica, Stage, TaskPlan
from launch.render import Process, check_startable, commands, render
from tests.launch.launch_cases import quick_gpus, quick_plan
from tests.plan import plan_cases

GOLDEN = Path(__file__).parents[1] / "golden" / "jobs.json"


def rendered(plan, gpus):
    jobs = render(plan, gpus)
    return commands(jobs, "quick-20260101-000000", gpus, dict.fromkeys(plan.site_order, ()))


def test_jobs_of_a_plan_over_three_gpu_sites_equal_the_golden_file():
    gpus = {device.id: device.gpu for device in plan_cases.topology().devices}
    plan = plan_cases.plan()
    jobs = rendered(replace(plan, weight_sync=replace(plan.weight_sync, encoding="full")), gpus)
    documents = [{**vars(job), "tasks": [command.to_json() for command in job.tasks]} for job in jobs]
    assert json.loads(json.dumps(documents)) == json.loads(GOLDEN.read_text())


def test_cpu_devices_get_one_thread_and_see_no_gpu():
    jobs = rendered(quick_plan(), quick_gpus(quick_plan()))
    assert [(job.site, job.name, [command.process.name for command in job.tasks]) for job in jobs] == [
        ("alpha", "gang", ["gateway", "controller", "actor_training-0", "actor_training-1"]),
        ("beta", "gang", ["gateway"]),
        ("gamma", "gang", ["gateway"]),
        ("beta", "array-cpu", ["actor_generation-0"]),
        ("gamma", "array-cpu", ["actor_generation-1"]),
    ]
    environments = [command.environment for job in jobs for command in job.tasks]
    assert all(environment["OMP_NUM_THREADS"] == "1" for environment in environments)
    assert all(environment["HETRL_RUN"] == "quick-20260101-000000" for environment in environments)
    assert all(environment["CUDA_VISIBLE_DEVICES"] == "" for environment in environments)


def test_replicas_of_a_gang_group_join_the_gang_of_their_site():
    plan = quick_plan()
    plan = replace(plan, groups=tuple(replace(group, job="gang") for group in plan.groups))
    jobs = {job.site: [command.process.name for command in job.tasks] for job in rendered(plan, quick_gpus(plan))}
    assert jobs["beta"] == ["gateway", "actor_generation-0"]
    assert jobs["gamma"] == ["gateway", "actor_generation-1"]


def test_array_of_larger_replicas_is_a_job_of_its_own():
    plan = quick_plan()
    replicas = (
        Replica(8, (Stage(("beta/b-0/0",), (0, 2)),)),
        Replica(8, (Stage(("beta/b-1/2", "beta/b-1/3"), (0, 2)),)),
    )
    devices = tuple(device for one in replicas for device in one.devices)
    tasks = {**plan.tasks, "actor_generation": TaskPlan("vllm", replicas)}
    groups = (plan.groups[0], Group(("actor_generation",), devices, "array"))
    plan = replace(plan, tasks=tasks, groups=groups, site_order=("alpha", "beta"))
    arrays = [job for job in rendered(plan, dict.fromkeys(plan_devices(plan), "l40s")) if job.kind == "array"]
    assert [job.name for job in arrays] == ["array-l40s", "array-l40s-x2"]
    assert arrays[1].tasks[0].environment["CUDA_VISIBLE_DEVICES"] == "2,3"


def plan_devices(plan):
    return [device for task in plan.tasks.values() for device in task.devices]


def test_replicas_of_an_inference_are_worlds_of_their_own_wherever_they_are():
    plan = quick_plan()
    small, wide = ("beta/b-0/0",), ("alpha/a-0/0", "alpha/a-0/1")
    replicas = (Replica(4, (Stage(small, (0, 2)),)), Replica(12, (Stage(wide, (0, 2)),)))
    reference = TaskPlan("megatron", replicas)
    plan = replace(plan, tasks={**plan.tasks, "reference_inference": reference})
    jobs = render(plan, dict.fromkeys(plan_devices(plan), "l40s"))
    ranks = {process.name: process for job in jobs for process in job.tasks if process.role == "reference_inference"}
    assert {name: process.world for name, process in ranks.items()} == {
        "reference_inference-0": small,
        "reference_inference-1": wide,
        "reference_inference-2": wide,
    }
    sites = {process.name: job.site for job in jobs for process in job.tasks if process.name in ranks}
    assert [sites[name] for name in sorted(sites)] == ["beta", "alpha", "alpha"]


def test_each_site_starts_its_ranks_of_a_training_that_spans_sites():
    plan = quick_plan()
    replicas = tuple(Replica(8, (Stage((device,), (0, 2)),)) for device in ("alpha/alpha-0/0", "beta/beta-0/0"))
    plan = replace(plan, tasks={**plan.tasks, "actor_training": TaskPlan("megatron", replicas)})
    jobs = render(plan, quick_gpus(plan))
    ranks = {one.name: (job.site, one.rank) for job in jobs for one in job.tasks if one.world}
    assert ranks == {"actor_training-0": ("alpha", 0), "actor_training-1": ("beta", 1)}


def test_site_without_a_device_is_refused():
    with pytest.raises(UsageError, match='"delta"'):
        rendered(replace(quick_plan(), site_order=("alpha", "beta", "gamma", "delta")), quick_gpus(quick_plan()))


def test_too_few_rollouts_to_begin_with_or_rollouts_that_take_turns_are_refused():
    plan = quick_plan()
    check_startable(plan, len(plan.tasks["actor_generation"].replicas))
    with pytest.raises(UsageError, match="launch.start_with: 3 rollouts, but the plan has 2"):
        check_startable(plan, 3)
    tasks = ("actor_training", "actor_generation")
    devices = tuple(device for name in tasks for device in plan.tasks[name].devices)
    shared = replace(plan, groups=(Group(tasks, devices),))
    check_startable(shared, "all")
    with pytest.raises(UsageError, match="launch.start_with: in this plan generation takes turns"):
        check_startable(shared, 1)


NODE = "alpha/alpha-0"
WORLD = (f"{NODE}/0", f"{NODE}/1")


@pytest.mark.parametrize(
    ("process", "name", "said"),
    [
        (Process("actor_training", 1, (f"{NODE}/1",), WORLD, NODE), "actor_training-1", "actor_training rank 1"),
        (Process("actor_generation", 0, (), (), NODE), "actor_generation-0", "actor_generation replica 0"),
        (Process("gateway", None, (), (), NODE), "gateway", "gateway"),
    ],
)
def test_processes_are_spoken_of_as_ranks_and_replicas(process, name, said):
    assert (process.name, process.spoken) == (name, said)
