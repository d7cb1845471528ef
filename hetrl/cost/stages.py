"""From a plan's stages to the shapes and paths that the formulas take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hetrl.cost.compute import StageShape
from hetrl.cost.efficiency import Rates
from hetrl.cost.model import CostModel
from hetrl.cost.network import path, slowest
from hetrl.hardware import Device, Path
from hetrl.plan.plan import Replica
from hetrl.workload import Architecture, Workload, has_language_head


@dataclass(frozen=True)
class Placed:
    """One stage on its devices: `peers` joins its tensor-parallel ranks, `hop` leads to the next stage."""

    shape: StageShape
    devices: tuple[Device, ...]
    peers: Path | None
    hop: Path | None

    @property
    def site(self) -> str:
        """Return the site of the stage's first rank."""
        return self.devices[0].site


def model_of(task: str, workload: Workload) -> Architecture:
    """Return the model that a task runs."""
    found = workload.architecture_of(task)
    if found is None:
        raise ValueError(f"{task}: the workload has no such task")
    return found


def stage_shape(task: str, replica: Replica, index: int, rates: Rates, workload: Workload) -> StageShape:
    """Return the shape of stage `index` of a replica whose slowest device has these rates."""
    stage = replica.stages[index]
    return StageShape(
        architecture=model_of(task, workload),
        layers=stage.layers[1] - stage.layers[0],
        first=index == 0,
        last=index == len(replica.stages) - 1,
        head=has_language_head(task),
        tensor_parallel=len(stage.devices),
        rates=rates,
        weight_bytes=workload.weight_bytes,
        recompute_layers=stage.recompute_layers,
    )


def place(task: str, replica: Replica, model: CostModel) -> tuple[Placed, ...]:
    """Return the stages of a replica with their shapes and paths; a mixed stage counts as its slowest GPU."""
    topology, rates = model.topology, model.efficiencies.rates
    devices = [tuple(topology.device_by_id[name] for name in stage.devices) for stage in replica.stages]
    placed = []
    for index, ranks in enumerate(devices):
        gpu = min({device.gpu for device in ranks}, key=lambda name: (rates(name).training_flops, name))
        following = devices[index + 1] if index + 1 < len(devices) else None
        hop = path(topology, ranks[0], following[0]) if following else None
        shape = stage_shape(task, replica, index, rates(gpu), model.workload)
        placed.append(Placed(shape, ranks, slowest(topology, ranks), hop))
    return tuple(placed)


def place_all(task: str, replicas: Sequence[Replica], model: CostModel) -> list[tuple[Placed, ...]]:
    """Return the placed stages of every replica; replicas on the same nodes are worked out once."""
    known: dict[object, tuple[Placed, ...]] = {}
    found = []
    for replica in replicas:
        devices = [tuple(model.topology.device_by_id[name] for name in stage.devices) for stage in replica.stages]
        spans = tuple((stage.layers, stage.recompute_layers) for stage in replica.stages)
        key = (spans, tuple(tuple((d.site, d.node) for d in ranks) for ranks in devices))
        if key not in known:
            known[key] = place(task, replica, model)
        found.append(tuple(replace(like, devices=ranks) for like, ranks in zip(known[key], devices, strict=True)))
    return found
