"""What a run's rows and summary say of its time and of what its jobs hold."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from hetrl.errors import HetrlError
from hetrl.files import append_line, read_lines
from hetrl.runtime import wire
from hetrl.runtime.data.prompts import Prompt
from hetrl.runtime.rl.sampling import PromptGroup
from hetrl.runtime.rl.stretches import Stretch
from hetrl.runtime.run.context import Context
from hetrl.runtime.run.progress import rows_until
from hetrl.runtime.run.record import Record, generation_seconds, gpu_hours, weight_metrics
from tests.plan.plan_cases import plan

NO_LINKS = wire.LinkStatsReply(links={}, refused=0, malformed=0)


def batch(*spans: tuple[float, float]) -> list[PromptGroup]:
    return [
        PromptGroup(Prompt("", ""), (1,), (), (), stretches=((Stretch("a/actor_generation/0", 1, sent, back),),))
        for sent, back in spans
    ]


def test_a_batch_is_generated_from_its_first_prompt_sent_to_its_last_sample_back() -> None:
    assert generation_seconds(batch((10.0, 12.0), (10.5, 14.0)), since=9.0) == (4.0, 4.0)


def test_a_link_that_is_out_and_back_is_noted_once_each(tmp_path: Path) -> None:
    record = Record(tmp_path, "alpha")
    for site, out in (("beta", False), ("beta", True), ("beta", True), ("gamma", False), ("beta", False)):
        record.link_changed(site, out=out)
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [(event["kind"], event["link"]) for event in events] == [
        ("link_out", "alpha-beta"),
        ("link_back", "alpha-beta"),
    ]


def test_batches_under_way_at_the_same_time_count_once() -> None:
    batches = [batch((0.0, 4.0), (0.0, 5.0)), batch((0.0, 7.0), (1.0, 9.0)), batch((5.0, 6.0)), batch((20.0, 23.0))]
    since, found = 0.0, []
    for one in batches:
        found.append(generation_seconds(one, since))
        since = max(since, *(group.back for group in one))
    assert found == [(5.0, 5.0), (4.0, 9.0), (0.0, 1.0), (3.0, 3.0)]


def test_gpu_hours_are_those_of_all_that_is_held() -> None:
    assert gpu_hours({"alps": 8, "lab": 1}, 1800.0) == {"alps": 4.0, "lab": 0.5}


def test_the_summary_compares_generation_and_the_whole_training_with_what_was_predicted(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    record = Record(tmp_path / "run", "alps")
    seconds = {
        "generation_wait": 0.5,
        "actor_generation": 30.0,
        "old_logprobs": 4.0,
        "actor_training": 20.0,
        "weight_sync": 1.0,
        "iteration": 22.0,
    }
    record.goes_on(0, 0, (), spent_seconds=132.0)
    for step in (1, 2, 3):
        row = {"step": step, "reward": 0.5, "samples": 64, "tokens": 640, "versions": {}, "seconds": seconds}
        record.step(row, 3)
    asynchronous = replace(plan(), algorithm=replace(plan().algorithm, mode="async", max_staleness=2))
    experiment = SimpleNamespace(name="try")
    context = SimpleNamespace(run="try-1", experiment=experiment, plan=asynchronous, held={"alps": 8, "jsc": 4})
    record.summary(cast(Context, context), NO_LINKS)
    summary: dict[str, Any] = json.loads((tmp_path / "run" / "summary.json").read_text())
    measured = {task: both["measured_seconds"] for task, both in summary["tasks"].items()}
    assert measured["actor_generation"] == 30.0
    assert measured["actor_training"] == 20.0
    assert set(measured) == {*plan().predicted.tasks, "iteration"}
    assert summary["elapsed_seconds"] >= 132.0
    assert summary["goodput"] == pytest.approx(3 * 22.0 / summary["elapsed_seconds"], abs=1e-3)
    held = summary["gpu_hours"]
    assert set(held) == {"alps", "jsc"} and held["alps"] == pytest.approx(2 * held["jsc"], abs=2e-4)


def test_what_went_into_steps_that_were_lost_counts_against_goodput(tmp_path: Path) -> None:
    """The run before took 100 s for three steps of 20, the last of which is taken again; after 9 s this one begins."""
    for name in ("before", "run"):
        (tmp_path / name).mkdir()
    row = {"reward": 0.5, "samples": 1, "tokens": 1, "versions": {}, "seconds": {"iteration": 20.0}}
    for step in (1, 2, 3):
        times = {"elapsed_seconds": 40.0 + 20 * step, "time": 1e9 + 40.0 + 20 * step}
        append_line(tmp_path / "before" / "metrics.jsonl", {"step": step, **row, **times})
    rows, spent_seconds = rows_until([tmp_path / "nowhere", tmp_path / "before" / "metrics.jsonl"], 2, 1e9 + 109.0)
    assert ([one["step"] for one in rows], spent_seconds) == ([1, 2], 109.0)
    record = Record(tmp_path / "run", "alps")
    record.goes_on(2, 3, rows, 4, spent_seconds)
    record.step({"step": 3, **row, "seconds": {"iteration": 30.0}}, 3)
    context = SimpleNamespace(run="try-1", experiment=SimpleNamespace(name="try"), plan=plan(), held={})
    record.summary(cast(Context, context), NO_LINKS)
    summary: dict[str, Any] = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["elapsed_seconds"] >= 109.0
    assert summary["tasks"]["iteration"]["measured_seconds"] == 30.0
    assert summary["goodput"] == pytest.approx(70 / summary["elapsed_seconds"], rel=1e-3)
    (fault,) = summary["faults"]
    assert (fault["what"], fault["step"]) == ("taken up behind step 2", 3)
    assert fault["seconds"] == pytest.approx(109.0 - 80.0 - 20.0, abs=1.0)


def test_a_row_that_is_missing_takes_no_other_with_it(tmp_path: Path) -> None:
    for name, steps in (("short", (1, 2)), ("long", (1, 2, 4)), ("later", (5, 6, 7, 8, 9))):
        for step in steps:
            times = {"elapsed_seconds": 10.0 * step, "time": 1e9 + 10.0 * step}
            append_line(tmp_path / name, {"step": step, **times})
    files = [tmp_path / name for name in ("nowhere", "short", "long", "later")]
    rows, spent_seconds = rows_until(files, 5, 1e9 + 42.0)
    assert ([row["step"] for row in rows], spent_seconds) == ([1, 2, 4], 42.0)
    assert rows_until([], 4, 1e9) == rows_until(files[:1], 4, 1e9) == ([], 0.0)


def test_what_another_clock_says_makes_no_run_shorter(tmp_path: Path) -> None:
    append_line(tmp_path / "metrics.jsonl", {"step": 1, "elapsed_seconds": 40.0, "time": 1e9})
    assert rows_until([tmp_path / "metrics.jsonl"], 1, 1e9 - 5)[1] == 40.0
    assert rows_until([tmp_path / "metrics.jsonl"], 0, 1e9 + 5) == ([], 45.0)


def test_a_run_whose_rows_say_no_time_is_taken_up(tmp_path: Path) -> None:
    append_line(tmp_path / "metrics.jsonl", {"step": 1, "elapsed_seconds": 40.0})
    append_line(tmp_path / "older.jsonl", {"step": 1})
    assert rows_until([tmp_path / "metrics.jsonl"], 1, 2e9)[1] == 40.0
    assert rows_until([tmp_path / "older.jsonl"], 1, 2e9) == ([{"step": 1}], 0.0)


def test_a_step_names_the_faults_that_touched_it(tmp_path: Path) -> None:
    record = Record(tmp_path, "alpha")
    row = {"reward": 0.5, "seconds": {"iteration": 2.0}}

    def faults_of(step: int) -> list[str]:
        record.step({"step": step, **row}, 9)
        found: list[str] = [*read_lines(tmp_path / "metrics.jsonl")][-1].get("faults", [])
        return found

    assert faults_of(1) == []
    record.replica_lost("beta/actor_generation/0", HetrlError("it is gone"))
    record.link_changed("gamma", out=True)
    record.link_changed("gamma", out=False)
    assert faults_of(2) == ["lost beta/actor_generation/0", "link alpha-gamma out"]
    assert faults_of(3) == ["lost beta/actor_generation/0"]
    record.replica_back("beta/actor_generation/0")
    assert faults_of(4) == ["lost beta/actor_generation/0"]
    assert faults_of(5) == []
    for _ in range(2):
        record.replica_lost("beta/actor_generation/0", HetrlError("it is gone"))
        record.replica_back("beta/actor_generation/0")
    assert faults_of(6) == ["lost beta/actor_generation/0, time 2"]

    (tmp_path / "resumed").mkdir()
    record = Record(tmp_path / "resumed", "alpha")
    record.goes_on(6, 6, [*read_lines(tmp_path / "metrics.jsonl")])
    record.replica_lost("beta/actor_generation/0", HetrlError("it is gone"))
    record.step({"step": 7, **row}, 9)
    last = [*read_lines(tmp_path / "resumed" / "metrics.jsonl")][-1]
    assert last["faults"] == ["taken up behind step 6", "lost beta/actor_generation/0, time 3"]


def test_a_replica_that_was_lost_before_it_came_is_a_fault_until_it_comes(tmp_path: Path) -> None:
    record, row = Record(tmp_path, "alpha"), {"reward": 0.5, "seconds": {"iteration": 2.0}}
    record.replica_lost("beta/actor_generation/0", HetrlError("its job failed"))
    record.replica_joined("beta/actor_generation/0")
    for step in (1, 2):
        record.step({"step": step, **row}, 9)
    faults = [line.get("faults", []) for line in read_lines(tmp_path / "metrics.jsonl")]
    assert faults == [["lost beta/actor_generation/0"], []]


def test_a_replica_that_is_given_back_is_no_fault(tmp_path: Path) -> None:
    record = Record(tmp_path, "alpha")
    record.replica_released("beta/actor_generation/0")
    record.replica_back("beta/actor_generation/0")
    record.step({"step": 1, "reward": 0.5, "seconds": {"iteration": 2.0}}, 9)
    (row,) = read_lines(tmp_path / "metrics.jsonl")
    assert "faults" not in row
    kinds = [event["kind"] for event in read_lines(tmp_path / "events.jsonl")]
    assert kinds == ["replica_released", "replica_back", "step"]


def published(**changes: Any) -> wire.Published:
    return wire.Published(
        **{"version": 3, "digest": "d", "bytes": 1000, "seconds": 0.5, "apply_seconds": {"a": 0.1}, **changes}
    )


def test_a_version_says_what_was_sent_of_it_and_what_changed(tmp_path: Path) -> None:
    assert weight_metrics(published()) == {"weight_bytes": 1000, "weight_full_bytes": 1000}
    delta = published(delta_bytes=10, changed=0.01, repaired={"b": "its base is version 1"})
    assert weight_metrics(delta) == {"weight_bytes": 10, "weight_full_bytes": 1000, "weights_changed": 0.01}
    record = Record(tmp_path, "alpha")
    record.published(published())
    record.published(delta)
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [event["kind"] for event in events] == ["weights_published", "weights_repaired", "weights_published"]
    assert events[1]["causes"] == {"b": "its base is version 1"}
    assert "delta_bytes" not in events[0]
    assert (events[2]["delta_bytes"], events[2]["changed"], events[2]["repaired"]) == (10, 0.01, ["b"])


def test_who_misses_a_version_and_who_has_the_newest_again_are_events(tmp_path: Path) -> None:
    record = Record(tmp_path, "alps")
    record.replicas_behind(7, {"b": "the link to b is out"})
    record.replicas_caught_up(published(apply_seconds={"b": 0.1}))
    behind, again = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert (behind["kind"], behind["version"], behind["causes"]) == (
        "replicas_behind",
        7,
        {"b": "the link to b is out"},
    )
    assert (again["kind"], again["version"], again["members"]) == ("replicas_caught_up", 3, ["b"])


def test_a_replica_that_is_lost_is_a_fault_that_the_run_survived(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    record = Record(tmp_path / "run", "alps")
    record.goes_on(0, 0, ())
    record.replica_lost("jsc/actor_generation/0", HetrlError("vllm: the server ended with exit code -9"))
    record.step(
        {"step": 1, "reward": 0.5, "samples": 1, "tokens": 1, "versions": {}, "seconds": {"iteration": 20.0}}, 1
    )
    context = SimpleNamespace(run="try-1", experiment=SimpleNamespace(name="try"), plan=plan(), held={})
    record.summary(cast(Context, context), NO_LINKS)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["faults_survived"] == 1


def test_a_run_without_a_row_has_no_summary(tmp_path: Path) -> None:
    record = Record(tmp_path, "alps")
    record.goes_on(4, 5, ())
    context = SimpleNamespace(run="try-1", experiment=SimpleNamespace(name="try"), plan=plan(), held={})
    record.summary(cast(Context, context), NO_LINKS)
    assert not (tmp_path / "summary.json").exists()
