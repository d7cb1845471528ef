"""The plan: the contract between planner, launcher and runtime (file format `hetrl-plan/1`).

A task is replicas (data parallel) of stages (pipeline) of devices in rank order (their number is the tensor parallel
degree); `layers` is half-open. Devices are `site/node/index`; the nodes of a plan are slots that the launcher binds to
hosts when the job starts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from decimal import Decimal
from typing import Any

from hetrl.workload import INFERENCES

FORMAT = "hetrl-plan/1"
IDLE_STATES = ("resident", "offload", "sleep")
RECOMPUTES = ("none", "selective", "full")
SHARDINGS = ("none", "data_parallel")


def site_of(device: str) -> str:
    """Return the site of a device or a node of the plan."""
    return device.split("/", 1)[0]


def node_of(device: str) -> str:
    """Return `site/node` of `site/node/index`."""
    return device.rsplit("/", 1)[0]


def sites_of(devices: Iterable[str]) -> list[str]:
    """Return the sites of devices, each once, in order."""
    return list(dict.fromkeys(map(site_of, devices)))


def nodes_of(devices: Iterable[str]) -> list[str]:
    """Return the nodes of devices, each once, in order."""
    return list(dict.fromkeys(map(node_of, devices)))


@dataclass(frozen=True)
class Stage:
    """One pipeline stage: its devices in rank order and its layers [first, last).

    Of a training with `recompute: full`, the first `recompute_layers` of them are computed again; None: all.
    """

    devices: tuple[str, ...]
    layers: tuple[int, int]
    recompute_layers: int | None = None


@dataclass(frozen=True)
class Replica:
    """One data-parallel replica and the samples of an iteration that it handles.

    A replica of generation has what its vLLM server gets: `kv_cache_gb` of keys and values on each of its devices, and
    `max_sequences` that run at once. Other replicas have neither. Its `samples` are what it is expected to draw: the
    dispatch of a run (`hetrl.dispatch`) begins with them as weights, and goes on by what replicas have done.
    """

    samples: int
    stages: tuple[Stage, ...]
    kv_cache_gb: float = 0.0
    max_sequences: int = 0

    @property
    def devices(self) -> tuple[str, ...]:
        """Return the devices of all stages, first stage first."""
        return tuple(device for stage in self.stages for device in stage.devices)

    @property
    def kv_cache_bytes(self) -> int:
        """Return `kv_cache_gb` in whole bytes, never more than the figure as it is written."""
        return int(Decimal(str(self.kv_cache_gb)) * 10**9)


@dataclass(frozen=True)
class TaskPlan:
    """How one task runs. Keys that an engine does not know stay at their defaults."""

    engine: str  # megatron | vllm
    replicas: tuple[Replica, ...]
    idle_state: str = "resident"
    micro_batch: int = 1
    recompute: str = "none"  # none | selective | full
    gradient_dtype: str = "fp32"  # fp32 | bf16: what the data-parallel reduction sends
    optimizer_sharding: str = "none"  # none | data_parallel

    @property
    def devices(self) -> tuple[str, ...]:
        """Return every device of the task."""
        return tuple(device for replica in self.replicas for device in replica.devices)

    @property
    def tensor_parallel(self) -> int:
        """Return the tensor-parallel degree of the first stage (training has one for all)."""
        return len(self.replicas[0].stages[0].devices)

    @property
    def pipeline_parallel(self) -> int:
        """Return the number of stages of the first replica."""
        return len(self.replicas[0].stages)

    def rank_order(self) -> tuple[str, ...]:
        """Return the devices in Megatron's rank order: tensor fastest, then data, then pipeline parallel."""
        return tuple(
            device
            for stage in range(self.pipeline_parallel)
            for replica in self.replicas
            for device in replica.stages[stage].devices
        )

    def stage_of(self, device: str) -> Stage:
        """Return the stage that holds a device of the task."""
        return next(stage for replica in self.replicas for stage in replica.stages if device in stage.devices)


def worlds(name: str, task: TaskPlan) -> tuple[TaskPlan, ...]:
    """Return the parts of a Megatron task whose ranks are a world of their own.

    The replicas of a training exchange gradients and are one; those of an inference have nothing to say to each other,
    and may differ in their tensor parallelism and their layers.
    """
    if name not in INFERENCES:
        return (task,)
    return tuple(replace(task, replicas=(replica,)) for replica in task.replicas)


@dataclass(frozen=True)
class Group:
    """Tasks that share a device set and never run at the same time; `job` is gang or, of generation alone, array."""

    tasks: tuple[str, ...]
    devices: tuple[str, ...]
    job: str = "gang"


@dataclass(frozen=True)
class Algorithm:
    """What the plan was made for."""

    kind: str
    mode: str
    max_staleness: int
    optimizer_steps_per_iteration: int


@dataclass(frozen=True)
class Solver:
    """Who made the plan: `status` is feasible or optimal, `bound_seconds` a proven lower bound where there is one.

    `objective` is what the plan was chosen for (`hetrl.cost.objective`).
    """

    name: str
    seed: int
    seconds: float
    evaluations: int
    status: str = "feasible"
    bound_seconds: float | None = None
    objective: str = "throughput"


@dataclass(frozen=True)
class Route:
    """The weights of a model (actor | critic) travel from one site to another over so many streams."""

    source: str
    target: str
    streams: int = 1
    model: str = "actor"


@dataclass(frozen=True)
class WeightSync:
    """How new weights reach who uses them (`hetrl.workload.TRAINED`): `encoding` is full or delta."""

    encoding: str = "full"
    routes: tuple[Route, ...] = ()


@dataclass(frozen=True)
class Predicted:
    """What the cost model says of the plan; seconds per task and weight sync, GB per device and per link.

    GPU-hours and price are those of all devices that the jobs hold (`hetrl.cost.charges`); None: no GPU has a price.
    """

    iteration_seconds: float
    samples_per_second: float
    tasks: Mapping[str, float] = field(default_factory=dict)
    peak_memory_gb: Mapping[str, float] = field(default_factory=dict)
    wan_gb_per_iteration: Mapping[str, float] = field(default_factory=dict)
    gpu_hours_per_iteration: float | None = None
    price_per_hour: float | None = None
    cost_per_iteration: float | None = None


@dataclass(frozen=True)
class Plan:
    """A whole plan."""

    algorithm: Algorithm
    groups: tuple[Group, ...]
    tasks: Mapping[str, TaskPlan]
    weight_sync: WeightSync
    site_order: tuple[str, ...]
    predicted: Predicted
    solver: Solver
    inputs: Mapping[str, str] = field(default_factory=dict)

    @property
    def devices(self) -> tuple[str, ...]:
        """Return every device that has a task, once."""
        return tuple(dict.fromkeys(device for task in self.tasks.values() for device in task.devices))

    @property
    def lead_site(self) -> str:
        """Return the site of the actor trainer's first rank: the controller runs there."""
        return self.site_order[0]

    def to_json(self) -> dict[str, Any]:
        """Return the plan as the JSON object of the file."""
        return {
            "format": FORMAT,
            "inputs": dict(self.inputs),
            "solver": _plain(self.solver),
            "algorithm": _plain(self.algorithm),
            "groups": [_plain(group) for group in self.groups],
            "tasks": {name: _plain(task) for name, task in self.tasks.items()},
            "weight_sync": {
                "encoding": self.weight_sync.encoding,
                "routes": [
                    {"from": route.source, "to": route.target, "streams": route.streams, "model": route.model}
                    for route in self.weight_sync.routes
                ],
            },
            "site_order": list(self.site_order),
            "predicted": _plain(self.predicted),
        }


def _plain(value: Any) -> Any:
    """Turn frozen dataclasses, tuples and mappings into JSON's types, equal to what is read back from the file."""
    if hasattr(value, "__dataclass_fields__"):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value
