"""Random legal plans over a small machine of three sites, and the experiment that they are for.

Six devices of two kinds; GRPO with a reference model, or PPO with all six tasks. A plan draws everything that plans
have: groups, replicas with their parallelism and shares, idle states, recomputation, sharding, micro-batches.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from hetrl.cost.check import violations
from hetrl.cost.memory import with_server
from hetrl.errors import UsageError
from hetrl.plan.plan import IDLE_STATES, RECOMPUTES, SHARDINGS, Plan, Replica, Stage, TaskPlan, node_of, site_of
from hetrl.problem import Problem
from hetrl.runtime.weights.tiny_model import write_tiny_model
from hetrl.search.assemble import Made, plan_of
from hetrl.workload import ACTOR_GENERATION, INFERENCES, TRAININGS
from lab.lab import ROOT
from lab.quickstart import changed
from launch.render import check_startable

SITES: Mapping[str, Sequence[tuple[str, int]]] = {  # each with its nodes: the kind and the number of their devices
    "alpha": (("cpu", 2),),
    "beta": (("cpu-half", 2),),
    "gamma": (("cpu", 1), ("cpu-half", 1)),
}
REWARD_MODEL = ROOT / "configs" / "models" / "larger-digit-reward"
LAYERS, SAMPLES, SAMPLES_PER_PROMPT, STEPS = 4, 64, 8, 2
# Supervised steps between two looks at the reward: all that it takes, for each look is a batch of samples.
WARM_START = {"reward": [0.1, 0.5], "steps_per_check": 40}
DRAWS = 10_000


def write_experiment(work: Path, mode: str, weights: Path | None = None, kind: str = "grpo") -> Path:
    """Write the experiment, its sites and its model into a directory; return the experiment.

    PPO has a reward model of another size than the actor, and a critic with the actor's layers. With `weights`, a
    Hugging Face directory, these are where the steps begin; without, a supervised start makes them.
    """
    work.mkdir(parents=True, exist_ok=True)
    for name, nodes in SITES.items():
        listed = [
            {"name": f"{name}-{number}", "gpu": gpu, "gpus": gpus, "nic_gbps": 10, "host_memory_gb": 8}
            for number, (gpu, gpus) in enumerate(nodes)
        ]
        (work / f"{name}.yaml").write_text(yaml.safe_dump({"name": name, "nodes": listed}))
    pairs = (["alpha", "beta"], ["alpha", "gamma"], ["beta", "gamma"])
    links = [{"between": pair, "delay_ms": 0.1, "gbps": 10} for pair in pairs]
    (work / "links.yaml").write_text(yaml.safe_dump({"links": links}))
    model = weights
    if model is None:
        model = work / "model"
        write_tiny_model(model, layers=LAYERS)
    algorithm: dict[str, Any] = {"mode": mode, "kl_coefficient": 0.05, "samples_per_prompt": SAMPLES_PER_PROMPT}
    algorithm |= {"kind": "ppo", "kl_in": "reward", "minibatches": 2} if kind == "ppo" else {}
    judged = {"kind": "both", "architecture": str(REWARD_MODEL), "weights": str(REWARD_MODEL)}
    return changed(
        work,
        **({"reward": judged, "critic": {"start": "actor", "learning_rate": 2e-3}} if kind == "ppo" else {}),
        model={"architecture": str(model), **({"weights": str(model)} if weights else {})},
        algorithm=algorithm | ({"max_staleness": 1} if mode == "async" else {}),
        batch={"samples": SAMPLES},
        rollouts={"shown": 0, "kept": True},
        steps=STEPS,
        topology={"sites": [str(work / f"{name}.yaml") for name in SITES], "links": str(work / "links.yaml")},
        warm_start=None if weights else WARM_START,
    )


def plan_on_one_device(problem: Problem) -> Plan:
    """Return the plan that runs everything on the first device, task after task."""
    device = (problem.topology.devices[0].id,)
    tasks = {}
    for name in problem.workload.tasks:
        alone = Replica(SAMPLES, (Stage(device, (0, _layers(problem, name))),))
        if name == ACTOR_GENERATION:
            tasks[name] = TaskPlan("vllm", (with_server(alone, 0.05, SAMPLES, problem.model),))
        else:
            tasks[name] = TaskPlan("megatron", (alone,), micro_batch=4)
    return plan_of(problem, [tasks], Made("one-device", 0, {}))


def _layers(problem: Problem, name: str) -> int:
    model = problem.workload.architecture_of(name)
    assert model is not None
    return model.layers


def random_plan(problem: Problem, seed: int, servers: int | None = None) -> Plan:
    """Return a legal plan that can be started, of at most `servers` generation replicas."""
    rng = random.Random(seed)
    for _ in range(DRAWS):
        plan = plan_of(problem, _groups(problem, rng), Made("random", seed, {}))
        try:
            check_startable(plan)
        except UsageError:
            continue
        if servers is not None and len(plan.tasks[ACTOR_GENERATION].replicas) > servers:
            continue
        if not violations(plan, problem.model):
            return plan
    raise AssertionError(f"no legal plan in {DRAWS} draws")


def _groups(problem: Problem, rng: random.Random) -> list[dict[str, TaskPlan]]:
    """Deal the tasks to groups, three at most of GRPO's and four of PPO's, and the devices to the groups."""
    topology, names = problem.topology, [*problem.workload.tasks]
    count = rng.randint(1, (len(names) + 3) // 2)
    rng.shuffle(names)
    hands: list[list[str]] = []
    while not all(hands) or not hands:
        owners = [rng.randrange(count) for _ in topology.devices]
        dealt = [*zip(topology.devices, owners, strict=True)]
        hands = [[device.id for device, owner in dealt if owner == group] for group in range(count)]
    return [{name: _task(name, hand, problem, rng) for name in names[g::count]} for g, hand in enumerate(hands)]


def _task(name: str, hand: Sequence[str], problem: Problem, rng: random.Random) -> TaskPlan:
    """Draw a task on some devices of a hand."""
    micro_batch, layers = rng.choice((1, 2, 4)), _layers(problem, name)
    if name in TRAININGS:
        sites = sorted({site_of(device) for device in hand})
        sites = rng.sample(sites, rng.randint(1, len(sites)))
        grids = _replicas([device for device in hand if site_of(device) in sites], layers, rng, alike=True)
        return TaskPlan(
            "megatron",
            _shared(grids, micro_batch, rng),
            idle_state=rng.choice(("resident", "offload")),
            micro_batch=micro_batch,
            recompute=rng.choice(RECOMPUTES),
            optimizer_sharding=rng.choice(SHARDINGS),
        )
    grids = [grid for site in SITES for grid in _replicas([one for one in hand if site_of(one) == site], layers, rng)]
    grids = rng.sample(grids, rng.randint(1, len(grids)))
    if name in INFERENCES:
        replicas = _shared(grids, 1, rng)
        return TaskPlan("megatron", replicas, rng.choice(("resident", "offload")), micro_batch)
    replicas = _shared(grids, SAMPLES_PER_PROMPT, rng)
    servers = tuple(with_server(one, 0.02, rng.choice((8, 16, 64)), problem.model) for one in replicas)
    return TaskPlan("vllm", servers, rng.choice(IDLE_STATES))


def _replicas(hand: Sequence[str], layers: int, rng: random.Random, alike: bool = False) -> list[tuple[Stage, ...]]:
    """Cut the devices of a site into replicas: stages of one or two devices of a node, the layers split anywhere."""
    left, found = list(hand), []
    tensor, stages, split = _grid(layers, rng)
    while left:
        if not alike:
            tensor, stages, split = _grid(layers, rng)
        pieces = _pieces(left, tensor)[:stages]
        if len(pieces) < stages:
            if alike and found:
                break
            tensor, stages, split = 1, 1, (0, layers)
            pieces = [(left[0],)]
        left = [device for device in left if not any(device in piece for piece in pieces)]
        found.append(tuple(Stage(piece, span) for piece, span in zip(pieces, pairwise(split), strict=True)))
    return found


def _grid(layers: int, rng: random.Random) -> tuple[int, int, tuple[int, ...]]:
    stages = rng.choice((1, 2))
    return rng.choice((1, 2)), stages, (0, layers) if stages == 1 else (0, rng.randint(1, layers - 1), layers)


def _pieces(devices: Sequence[str], size: int) -> list[tuple[str, ...]]:
    """Return disjoint sets of `size` devices of one node."""
    nodes: dict[str, list[str]] = {}
    for device in devices:
        nodes.setdefault(node_of(device), []).append(device)
    return [
        tuple(on_node[start : start + size])
        for on_node in nodes.values()
        for start in range(0, len(on_node) - size + 1, size)
    ]


def _shared(grids: Sequence[tuple[Stage, ...]], unit: int, rng: random.Random) -> tuple[Replica, ...]:
    """Give each replica some of the samples, in whole units."""
    shares = [1] * len(grids)
    for _ in range(SAMPLES // unit - len(grids)):
        shares[rng.randrange(len(grids))] += 1
    return tuple(Replica(share * unit, stages) for share, stages in zip(shares, grids, strict=True))
