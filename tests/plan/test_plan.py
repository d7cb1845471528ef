"""The plan file: it survives a round trip, and a mistake made by hand is named with its place."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from hetrl.errors import UsageError
from hetrl.plan.document import plan_from_json, read_plan
from hetrl.plan.plan import (
    IDLE_STATES,
    RECOMPUTES,
    Algorithm,
    Group,
    Plan,
    Predicted,
    Replica,
    Route,
    Solver,
    Stage,
    TaskPlan,
    WeightSync,
)
from hetrl.workload import TASKS
from tests.locales import in_the_c_locale
from tests.plan.plan_cases import plan

GOLDEN = Path(__file__).parents[1] / "golden" / "plan.json"

names = st.text(min_size=1, max_size=8)
counts = st.integers(0, 10**6)
amounts = st.floats(0, 1e9)
by_name = st.dictionaries(names, amounts, max_size=3)


def several(items: st.SearchStrategy[Any], least: int = 1) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.lists(items, min_size=least, max_size=3).map(tuple)


stages = st.builds(Stage, several(names), st.tuples(counts, counts), st.none() | counts)
replicas = st.builds(Replica, counts, several(stages), amounts, counts)
tasks = st.builds(
    TaskPlan,
    engine=st.sampled_from(["megatron", "vllm"]),
    replicas=several(replicas),
    idle_state=st.sampled_from(IDLE_STATES),
    micro_batch=st.integers(1, 64),
    recompute=st.sampled_from(RECOMPUTES),
    gradient_dtype=st.sampled_from(["fp32", "bf16"]),
    optimizer_sharding=st.sampled_from(["none", "data_parallel"]),
)
plans = st.builds(
    Plan,
    algorithm=st.builds(
        Algorithm, st.sampled_from(["ppo", "grpo"]), st.sampled_from(["sync", "async"]), counts, st.integers(1, 64)
    ),
    groups=several(st.builds(Group, several(names), several(names), st.sampled_from(["gang", "array"]))),
    tasks=st.dictionaries(st.sampled_from(TASKS), tasks, max_size=3),
    weight_sync=st.builds(
        WeightSync,
        st.sampled_from(["full", "delta"]),
        several(st.builds(Route, names, names, st.integers(1, 64)), least=0),
    ),
    site_order=several(names),
    predicted=st.builds(Predicted, amounts, amounts, by_name, by_name, by_name, *[st.none() | amounts] * 3),
    solver=st.builds(
        Solver,
        names,
        st.integers(),
        amounts,
        counts,
        st.sampled_from(["feasible", "optimal"]),
        st.none() | amounts,
        st.sampled_from(["throughput", "cost"]),
    ),
    inputs=st.dictionaries(names, st.text(max_size=8), max_size=2),
)


@given(plans)
def test_a_plan_survives_the_file(original: Plan) -> None:
    assert plan_from_json(json.loads(json.dumps(original.to_json()))) == original


@given(amounts)
def test_a_server_gets_no_byte_more_than_the_file_says(gigabytes: float) -> None:
    replica = Replica(1, (), gigabytes, 1)
    written = Decimal(json.dumps(_replica_json(replica)["kv_cache_gb"]))
    assert written * 10**9 - 1 < replica.kv_cache_bytes <= written * 10**9


def test_a_round_figure_is_so_many_bytes() -> None:
    assert Replica(1, (), 73.6, 1).kv_cache_bytes == 73_600_000_000
    assert Replica(1, (), 0.0009, 1).kv_cache_bytes == 900_000


def _replica_json(replica: Replica) -> Any:
    whole = replace(plan(), tasks={"actor_generation": TaskPlan("vllm", (replica,))})
    return whole.to_json()["tasks"]["actor_generation"]["replicas"][0]


def test_the_golden_file_is_the_plan_of_the_tests() -> None:
    assert read_plan(GOLDEN) == plan()


def test_the_format_of_the_file_is_stable() -> None:
    assert plan().to_json() == json.loads(GOLDEN.read_text())
    assert list(plan().to_json()) == list(json.loads(GOLDEN.read_text()))


def test_a_task_may_leave_out_what_its_engine_does_not_know() -> None:
    document = json.loads(GOLDEN.read_text())
    for key in ("micro_batch", "recompute", "gradient_dtype", "optimizer_sharding"):
        del document["tasks"]["actor_generation"][key]
    for key in ("kv_cache_gb", "max_sequences"):
        del document["tasks"]["actor_training"]["replicas"][0][key]
    assert plan_from_json(document) == plan()


def test_rank_order_is_tensor_then_data_then_pipeline() -> None:
    assert plan().tasks["actor_training"].rank_order() == (
        *("alps/a100-0/0", "alps/a100-0/1"),
        *("alps/a100-1/0", "alps/a100-1/1"),
        *("alps/a100-0/2", "alps/a100-0/3"),
        *("alps/a100-1/2", "alps/a100-1/3"),
    )


def test_a_task_tells_its_devices_and_degrees() -> None:
    training = plan().tasks["actor_training"]
    assert (training.tensor_parallel, training.pipeline_parallel) == (2, 2)
    assert sorted(training.devices) == sorted(training.rank_order())
    assert training.replicas[1].devices == tuple(f"alps/a100-1/{index}" for index in range(4))
    assert plan().lead_site == "alps"


Edit = Callable[[Any], Any]
MISTAKES: dict[str, tuple[Edit, str]] = {
    "other format": (lambda d: d.update(format="hetrl-plan/9"), "format: Input should be 'hetrl-plan/1'"),
    "no groups": (lambda d: d.pop("groups"), 'the key "groups" is missing'),
    "no stages": (
        lambda d: d["tasks"]["actor_training"]["replicas"][1].pop("stages"),
        'the key "tasks.actor_training.replicas.1.stages" is missing',
    ),
    "unknown top key": (lambda d: d.update(site_ordr=["alps"]), 'unknown key "site_ordr"; did you mean "site_order"?'),
    "unknown key of a route": (
        lambda d: d["weight_sync"]["routes"][0].update(stream=2),
        'unknown key "weight_sync.routes.0.stream"; did you mean "streams"?',
    ),
    "unknown key of a task": (
        lambda d: d["tasks"]["actor_training"].update(microbatch=2),
        'unknown key "tasks.actor_training.microbatch"; did you mean "micro_batch"?',
    ),
    "a cache of the whole task": (
        lambda d: d["tasks"]["actor_generation"].update(kv_cache_gb=9.5),
        'unknown key "tasks.actor_generation.kv_cache_gb"',
    ),
    "negative cache": (
        lambda d: d["tasks"]["actor_generation"]["replicas"][2].update(kv_cache_gb=-1.0),
        "tasks.actor_generation.replicas.2.kv_cache_gb: ",
    ),
    "fractional samples": (
        lambda d: d["tasks"]["actor_training"]["replicas"][0].update(samples=1.5),
        "tasks.actor_training.replicas.0.samples: ",
    ),
    "three layer bounds": (
        lambda d: d["tasks"]["actor_training"]["replicas"][0]["stages"][0].update(layers=[0, 1, 2]),
        "tasks.actor_training.replicas.0.stages.0.layers",
    ),
    "unknown engine": (
        lambda d: d["tasks"]["actor_generation"].update(engine="sglang"),
        "tasks.actor_generation.engine",
    ),
    "unknown job": (lambda d: d["groups"][0].update(job="loose"), "groups.0.job: "),
    "negative seconds": (lambda d: d["predicted"]["tasks"].update(weight_sync=-1), "predicted.tasks.weight_sync: "),
    "empty site order": (lambda d: d.update(site_order=[]), "site_order: "),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_made_by_hand_is_named(case: str) -> None:
    edit, message = MISTAKES[case]
    document = copy.deepcopy(plan().to_json())
    edit(document)
    with pytest.raises(UsageError) as caught:
        plan_from_json(document, "my-plan.json")
    assert str(caught.value).startswith("my-plan.json: ")
    assert message in str(caught.value)


def test_every_mistake_has_a_line() -> None:
    document = copy.deepcopy(plan().to_json())
    del document["groups"]
    document["algorithm"]["kind"] = "reinforce"
    with pytest.raises(UsageError) as caught:
        plan_from_json(document)
    assert len(str(caught.value).splitlines()) == 2


@pytest.mark.parametrize("document", [None, [], "plan", 3])
def test_what_is_no_object_is_refused(document: object) -> None:
    with pytest.raises(UsageError, match=r"^plan\.json: "):
        plan_from_json(document)


def test_a_missing_file_and_broken_json(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"absent\.json: No such file.*hetrl plan CONFIG"):
        read_plan(tmp_path / "absent.json")
    (tmp_path / "broken.json").write_text('{"format":\n oops}')
    with pytest.raises(UsageError, match=r"broken\.json: not JSON \(line 2"):
        read_plan(tmp_path / "broken.json")


def test_the_file_is_utf_8_whatever_the_locale(tmp_path: Path) -> None:
    original = replace(plan(), solver=replace(plan().solver, name="größer"))
    (tmp_path / "plan.json").write_text(json.dumps(original.to_json(), ensure_ascii=False), encoding="utf-8")
    with in_the_c_locale():
        assert read_plan(tmp_path / "plan.json") == original


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match=r"plan\.json: "):
        read_plan(tmp_path / "plan.json")
