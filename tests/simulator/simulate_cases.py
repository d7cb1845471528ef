"""Small plans over two sites that can be worked out by hand, for the tests of the simulator."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hetrl.cost.model import CostModel
from hetrl.cost.stages import Placed, place
from hetrl.cost.weight_sync import weight_routes
from hetrl.hardware import Link, Node, Site, Topology
from hetrl.plan.plan import Algorithm, Group, Plan, Predicted, Replica, Route, Solver, Stage, TaskPlan, WeightSync
from hetrl.simulator.events import Clock, Process
from hetrl.simulator.pipelines import Setting, scoring, training
from hetrl.simulator.trace import Recorder
from hetrl.simulator.wires import Network
from hetrl.workload import Lengths, Workload, architecture


def small_workload(**changes: Any) -> Workload:
    model = architecture("qwen3-1.7b")
    base = Workload("grpo", "sync", 0, 16, 4, 128, Lengths(64, 64), 2, model)
    return replace(base, **changes)


def two_sites(gbps: float = 1.0, delay_ms: float = 20.0) -> Topology:
    sites = (Site("a", (Node("n0", "a100-80gb", 4),)), Site("b", (Node("n0", "l40s", 4),)))
    return Topology(sites, (Link(("a", "b"), delay_ms, gbps),))


def small_plan(workload: Workload, stages: tuple[Stage, ...], micro_batch: int = 2) -> Plan:
    """Train at a (and wherever the stages are), generate at b."""
    trainer = TaskPlan("megatron", (Replica(workload.samples, stages),), micro_batch=micro_batch)
    stages_of_rollouts = [(Stage((f"b/n0/{2 + index}",), (0, 28)),) for index in range(2)]
    generator = TaskPlan("vllm", tuple(Replica(workload.samples // 2, one, 20.0, 64) for one in stages_of_rollouts))
    groups = (Group(("actor_training",), trainer.devices), Group(("actor_generation",), generator.devices, "array"))
    return Plan(
        Algorithm("grpo", workload.mode, workload.max_staleness, workload.optimizer_steps_per_iteration),
        groups,
        {"actor_generation": generator, "actor_training": trainer},
        WeightSync("full", (Route("a", "b"),)),
        ("a", "b"),
        Predicted(1.0, 1.0),
        Solver("hand", 0, 0.0, 0),
    )


ONE_STAGE = (Stage(("a/n0/0",), (0, 28)),)
TWO_STAGES = (Stage(("a/n0/0",), (0, 18)), Stage(("a/n0/1",), (18, 28)))
ACROSS = (Stage(("a/n0/0",), (0, 20)), Stage(("b/n0/0",), (20, 28)))


def setting_of(topology: Topology, workload: Workload) -> Setting:
    clock, recorder = Clock(), Recorder()
    return Setting(CostModel(topology, workload), clock, Network(topology, clock, recorder), recorder)


def trained_seconds(plan: Plan, topology: Topology, workload: Workload) -> tuple[float, Setting]:
    setting = setting_of(topology, workload)
    lengths = [workload.response.maximum] * workload.samples
    task = plan.tasks["actor_training"]

    def trained() -> Process:
        if workload.scores_batch:
            yield from scoring(setting, task, lengths)
        yield from training(setting, "actor_training", task, lengths)

    setting.clock.run(setting.clock.start(trained()))
    return setting.clock.now, setting


def stages_of(plan: Plan, topology: Topology, workload: Workload) -> tuple[Placed, ...]:
    return place("actor_training", plan.tasks["actor_training"].replicas[0], CostModel(topology, workload))


def one_device(device: str, workload: Workload) -> TaskPlan:
    return TaskPlan("megatron", (Replica(workload.samples, (Stage((device,), (0, 28)),)),), micro_batch=4)


def plan_with_critic(workload: Workload) -> Plan:
    """Train actor and critic at a, generate there, value at b: the critic's weights alone cross the link."""
    whole = small_plan(workload, ONE_STAGE, micro_batch=4)
    rollouts = [(Stage((f"a/n0/{2 + index}",), (0, 28)),) for index in range(2)]
    tasks = {
        "actor_generation": replace(
            whole.tasks["actor_generation"],
            replicas=tuple(Replica(workload.samples // 2, one, 20.0, 64) for one in rollouts),
        ),
        "actor_training": whole.tasks["actor_training"],
        "critic_training": one_device("a/n0/1", workload),
        "critic_inference": one_device("b/n0/0", workload),
    }
    groups = tuple(Group((name,), task.devices) for name, task in tasks.items())
    return replace(whole, tasks=tasks, groups=groups, weight_sync=weight_routes(tasks))
