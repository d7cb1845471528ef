"""The answer to a single question about weight versions that cross sites."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from hetrl.cost.efficiency import Efficiencies, calibrated
from hetrl.cost.model import CostModel
from hetrl.cost.weight_sync import weight_routes, weight_sync_cost
from hetrl.errors import UsageError, nearest
from hetrl.hardware import Node, Topology
from hetrl.lengths import Lengths
from hetrl.plan.plan import Replica, Stage, TaskPlan
from hetrl.questions.answer import Answer
from hetrl.workload import ACTOR_GENERATION, ACTOR_TRAINING, Architecture, Workload

_WEIGHTS_SHARE = 0.6  # of a rollout GPU's memory: the rest is for keys and values


def weight_sync(
    model: Architecture,
    topology: Topology,
    sources: Sequence[str],
    targets: Sequence[str],
    encoding: str = "full",
    changed: float | None = None,
    efficiencies: Efficiencies | None = None,
) -> Answer:
    """Return the time of one weight version from the sites that train to those that generate.

    The layers are divided over the first node of each source; each target generates on as few GPUs of a node as hold
    the weights. `changed` is the share of weights that a delta carries; without one a delta costs as much as the full
    set. Nobody measured how fast a GPU type copies weights to its host and loads them: every type is uncalibrated.
    """
    if changed is not None and not 0 < changed <= 1:
        raise UsageError(f"--changed is the share of weights that change, above 0 and at most 1, not {changed:g}")
    if changed is not None and encoding != "delta":
        raise UsageError(f"--changed is of deltas, the encoding is {encoding}: leave it out, or say --encoding delta")
    for name in (*sources, *targets):
        if name not in topology.site_by_name:
            known = topology.site_by_name
            raise UsageError(f'the topology has no site "{name}"{nearest(name, known)}; known: {", ".join(known)}')
    for source in sources:
        if lone := [target for target in targets if target != source and not topology.linked(source, target)]:
            raise UsageError(f"{source} and {lone[0]} have no link; add the file that has it to --topology")
    # Of a job, a version's way depends on the actor and the bytes of a weight alone.
    workload = Workload("grpo", "sync", 0, 1, 1, 1, Lengths(1, 1), 1, actor=model)
    costs = CostModel(topology, workload, (efficiencies or calibrated()).with_types(topology.described))
    trainer = TaskPlan("megatron", (Replica(1, _senders(model, topology, sources)),))
    generator = TaskPlan("vllm", tuple(Replica(1, (_receiver(model, costs, site),)) for site in targets))
    tasks = {ACTOR_TRAINING: trainer, ACTOR_GENERATION: generator}
    cost = weight_sync_cost(replace(weight_routes(tasks), encoding=encoding), tasks, costs, changed=changed)
    share, usable = _fullest(model, generator, costs)
    return Answer(
        seconds=cost.seconds,
        tokens=0.0,
        gpus=len(trainer.devices) + len(generator.devices),
        breakdown={"transfer": cost.transfer_seconds, "pause": cost.pause_seconds},
        memory_gb=share,
        usable_gb=usable,
        uncalibrated={topology.device_by_id[d].gpu: ("weight sync",) for d in (*trainer.devices, *generator.devices)},
        details={"wan_gb": {f"{a}-{b}": load / 1e9 for (a, b), load in cost.wan_bytes.items()}},
    )


def _senders(model: Architecture, topology: Topology, sites: Sequence[str]) -> tuple[Stage, ...]:
    bounds = [model.layers * index // len(sites) for index in range(len(sites) + 1)]
    nodes = [topology.site_by_name[site].nodes[0] for site in sites]
    held = zip(sites, nodes, pairwise(bounds), strict=True)
    return tuple(Stage(_devices(site, node, node.gpus), layers) for site, node, layers in held)


def _devices(site: str, node: Node, count: int) -> tuple[str, ...]:
    return tuple(f"{site}/{node.name}/{index}" for index in range(count))


def _receiver(model: Architecture, costs: CostModel, site: str) -> Stage:
    node = costs.topology.site_by_name[site].nodes[0]
    usable = costs.efficiencies.rates(node.gpu).usable_gb
    degrees = [2**power for power in range(8) if 2**power <= node.gpus and model.heads % 2**power == 0]
    enough = [tp for tp in degrees if model.parameters * 2e-9 / tp <= _WEIGHTS_SHARE * usable]
    return Stage(_devices(site, node, (enough or degrees[-1:])[0]), (0, model.layers))


def _fullest(model: Architecture, generator: TaskPlan, costs: CostModel) -> tuple[float, float]:
    """Return the weights per GPU of the receiver with the least room, and that GPU's usable memory."""
    weights = ((model.parameters * 2e-9 / len(one.devices), one.devices[0]) for one in generator.replicas)
    return max(((gb, costs.rates(device).usable_gb) for gb, device in weights), key=lambda pair: pair[0] / pair[1])
