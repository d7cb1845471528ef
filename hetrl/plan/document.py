"""Read `plan.json`: every key is checked, so that a file that was edited by hand fails with a name and a place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from pydantic import Field, ValidationError

from hetrl.describe.yaml_file import AtLeastOne, NotNegative, Strict, explain
from hetrl.errors import UsageError
from hetrl.plan.plan import Plan

Text = Annotated[str, Field(min_length=1)]
Whole = Annotated[int, Field(ge=0)]


class _Stage(Strict):
    devices: list[Text] = Field(min_length=1)
    layers: tuple[Whole, Whole]
    recompute_layers: Whole | None = None


class _Replica(Strict):
    samples: Whole
    stages: list[_Stage] = Field(min_length=1)
    kv_cache_gb: NotNegative = 0.0
    max_sequences: Whole = 0


class _Task(Strict):
    engine: Literal["megatron", "vllm"]
    replicas: list[_Replica] = Field(min_length=1)
    idle_state: Literal["resident", "offload", "sleep"] = "resident"
    micro_batch: AtLeastOne = 1
    recompute: Literal["none", "selective", "full"] = "none"
    gradient_dtype: Literal["fp32", "bf16"] = "fp32"
    optimizer_sharding: Literal["none", "data_parallel"] = "none"


class _Group(Strict):
    tasks: list[Text] = Field(min_length=1)
    devices: list[Text] = Field(min_length=1)
    job: Literal["gang", "array"] = "gang"


class _Algorithm(Strict):
    kind: Literal["ppo", "grpo"]
    mode: Literal["sync", "async"]
    max_staleness: Whole
    optimizer_steps_per_iteration: AtLeastOne


class _Solver(Strict):
    name: Text
    seed: int
    seconds: NotNegative
    evaluations: Whole
    status: Text = "feasible"
    bound_seconds: float | None = None
    objective: Text = "throughput"


class _Route(Strict):
    source: Text = Field(alias="from")
    target: Text = Field(alias="to")
    streams: AtLeastOne = 1
    model: Literal["actor", "critic"] = "actor"


class _WeightSync(Strict):
    encoding: Literal["full", "delta"] = "full"
    routes: list[_Route] = Field(default_factory=list)


class _Predicted(Strict):
    iteration_seconds: NotNegative
    samples_per_second: NotNegative
    tasks: dict[str, NotNegative] = Field(default_factory=dict)
    peak_memory_gb: dict[str, NotNegative] = Field(default_factory=dict)
    wan_gb_per_iteration: dict[str, NotNegative] = Field(default_factory=dict)
    gpu_hours_per_iteration: NotNegative | None = None
    price_per_hour: NotNegative | None = None
    cost_per_iteration: NotNegative | None = None


class _Plan(Strict):
    format: Literal["hetrl-plan/1"]
    inputs: dict[str, str] = Field(default_factory=dict)
    solver: _Solver
    algorithm: _Algorithm
    groups: list[_Group] = Field(min_length=1)
    tasks: dict[str, _Task]
    weight_sync: _WeightSync
    site_order: list[Text] = Field(min_length=1)
    predicted: _Predicted


def plan_from_json(document: Any, where: str = "plan.json") -> Plan:
    """Return the plan of a parsed JSON document; raises UsageError naming the key that is wrong."""
    try:
        read = _Plan.model_validate(document)
    except ValidationError as error:
        raise UsageError(explain(error, _Plan, where)) from None
    return msgspec.convert(read.model_dump(), Plan)


def read_plan(path: Path) -> Plan:
    """Read a plan file; raises UsageError where it is missing or not a plan."""
    try:
        return plan_from_json(json.loads(path.read_text(encoding="utf-8")), str(path))
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}; make one with `hetrl plan CONFIG -o {path}`") from None
    except json.JSONDecodeError as error:
        raise UsageError(f"{path}: not JSON (line {error.lineno}: {error.msg})") from None
    except RecursionError:
        raise UsageError(f"{path}: its lists or objects lie deeper in one another than can be read") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from None
