"""Read `plan.json`: every key is checked, so that a file that was edited by hand fails with a name and a place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hetrl.describe.yaml_file import explain
from hetrl.errors import UsageError
from hetrl.plan import plan as p

Text = Annotated[str, Field(min_length=1)]
Whole = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(ge=0)]
NotNegative = Annotated[float, Field(ge=0)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class _Stage(_Strict):
    devices: list[Text] = Field(min_length=1)
    layers: tuple[Whole, Whole]


class _Replica(_Strict):
    samples: Whole
    stages: list[_Stage] = Field(min_length=1)


class _Task(_Strict):
    engine: Literal["megatron", "vllm"]
    replicas: list[_Replica] = Field(min_length=1)
    idle_state: Literal["resident", "offload", "sleep"] = "resident"
    micro_batch: Annotated[int, Field(ge=1)] = 1
    recompute: Literal["none", "full"] = "none"
    gradient_dtype: Literal["fp32", "bf16"] = "fp32"
    optimizer_sharding: Literal["none", "data_parallel"] = "none"
    kv_cache_gb: Seconds = 0.0
    max_sequences: Whole = 0


class _Group(_Strict):
    tasks: list[Text] = Field(min_length=1)
    devices: list[Text] = Field(min_length=1)
    job: Literal["gang", "array"] = "gang"


class _Algorithm(_Strict):
    kind: Literal["ppo", "grpo"]
    mode: Literal["sync", "async"]
    max_staleness: Whole
    optimizer_steps_per_iteration: Annotated[int, Field(ge=1)]


class _Solver(_Strict):
    name: Text
    seed: int
    seconds: Seconds
    evaluations: Whole
    status: Text = "feasible"
    bound_seconds: float | None = None
    objective: Text = "throughput"


class _Route(_Strict):
    source: Text = Field(alias="from")
    target: Text = Field(alias="to")
    streams: Annotated[int, Field(ge=1)] = 1


class _WeightSync(_Strict):
    encoding: Literal["full", "delta"] = "full"
    routes: list[_Route] = []


class _Predicted(_Strict):
    iteration_seconds: Seconds
    samples_per_second: Seconds
    tasks: dict[str, Seconds] = {}
    peak_memory_gb: dict[str, Seconds] = {}
    wan_gb_per_iteration: dict[str, Seconds] = {}
    gpu_hours_per_iteration: NotNegative | None = None
    price_per_hour: NotNegative | None = None
    cost_per_iteration: NotNegative | None = None


class _Plan(_Strict):
    format: Literal["hetrl-plan/1"]
    inputs: dict[str, str] = {}
    solver: _Solver
    algorithm: _Algorithm
    groups: list[_Group] = Field(min_length=1)
    tasks: dict[str, _Task]
    weight_sync: _WeightSync
    site_order: list[Text] = Field(min_length=1)
    predicted: _Predicted


def plan_from_json(document: Any, where: str = "plan.json") -> p.Plan:
    """Return the plan of a parsed JSON document; raises UsageError naming the key that is wrong."""
    try:
        read = _Plan.model_validate(document)
    except ValidationError as error:
        raise UsageError(explain(error, _Plan, where)) from None
    return p.Plan(
        algorithm=p.Algorithm(**read.algorithm.model_dump()),
        groups=tuple(p.Group(tuple(g.tasks), tuple(g.devices), g.job) for g in read.groups),
        tasks={name: _task(task) for name, task in read.tasks.items()},
        weight_sync=p.WeightSync(
            read.weight_sync.encoding,
            tuple(p.Route(r.source, r.target, r.streams) for r in read.weight_sync.routes),
        ),
        site_order=tuple(read.site_order),
        predicted=p.Predicted(**read.predicted.model_dump()),
        solver=p.Solver(**read.solver.model_dump()),
        inputs=read.inputs,
    )


def _task(task: _Task) -> p.TaskPlan:
    replicas = tuple(
        p.Replica(r.samples, tuple(p.Stage(tuple(s.devices), s.layers) for s in r.stages)) for r in task.replicas
    )
    return p.TaskPlan(replicas=replicas, **task.model_dump(exclude={"replicas"}))


def read_plan(path: Path) -> p.Plan:
    """Read a plan file; raises UsageError where it is missing or not a plan."""
    try:
        return plan_from_json(json.loads(path.read_text()), str(path))
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}; make one with `hetrl plan CONFIG -o {path}`") from None
    except json.JSONDecodeError as error:
        raise UsageError(f"{path}: not JSON (line {error.lineno}: {error.msg})") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from None
