"""The pages of a plan and a run: everything is there, names cannot inject markup, nothing is fetched."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from hetrl.cost.model import CostModel
from hetrl.explanation import Explanation, Study, explain, with_choices
from hetrl.explanation.what_if import RunnerUp, Term, WhatIf
from hetrl.problem import Problem
from hetrl.report.facts import replica_rates, staleness_counts
from hetrl.report.gantt import gantt
from hetrl.report.page import PALETTE, SHORT
from hetrl.report.plan_page import plan_page
from hetrl.report.played import played
from hetrl.report.rows import link_rows
from hetrl.report.run_page import run_page
from hetrl.simulator import Simulated, Span, simulate
from hetrl.workload import TASKS
from launch.reports import draw_run_page, write_run_page
from launch.run_directory import Run
from tests.plan.plan_cases import plan, topology, workload
from tests.report.report_cases import EVENTS, HOSTILE, METRICS, SUMMARY, Page, hostile

ROOT = Path(__file__).parents[2]


def plan_of_tests() -> str:
    return plan_page(plan(), topology(), workload())


def run_of_tests() -> str:
    return run_page(SUMMARY, METRICS, EVENTS, plan())


FAILED: list[dict[str, Any]] = [
    {"time": 99.0, "source": "launcher", "sequence": 0, "kind": "planned", "run": "try-1", "name": "try", "steps": 40},
    *EVENTS[:3],
    {
        "time": 107.0,
        "source": "alps",
        "sequence": 1,
        "kind": "failed",
        "cause": f"no word from {HOSTILE}\nsee logs",
    },
    {"time": 109.0, "source": "launcher", "sequence": 2, "kind": "failed", "cause": "alps: the trainer is gone"},
]


def explained() -> Explanation:
    problem = Problem(topology(), workload())
    found = with_choices(explain(plan(), problem), problem)
    terms = (Term("actor_training", 21.0, 25.0), Term("weight_sync", 0.5, 0.25))
    other = RunnerUp("verl", 45.0, (("actor_generation", "actor_training"),), ("alps", "jsc"), terms)
    answers = (
        WhatIf("as it is", 41.25, True, 41.25),
        WhatIf("without lab", 44.0, value=44.0),
        WhatIf("without alps", None),
    )
    return replace(found, study=Study(answers, other, found.plan.predicted.iteration_seconds))


def explained_of_tests() -> str:
    found = explained()
    play = simulate(found.plan, CostModel(topology(), workload()), iterations=3)
    return plan_page(found.plan, topology(), workload(), found, played(found.plan, play))


SAMPLES = [
    {
        "step": step,
        "prompt": f"q{step} <b>",
        "response": "two\n lines",
        "answer": "5",
        "reward": 0.25 * step,
        "reward_rule": 1.0,
        "reward_model": -2.5,
        "tokens": 3,
        "finish_reason": "length",
    }
    for step in range(1, 40)
]


PAGES = {
    "plan": plan_of_tests,
    "plan with its explanation": explained_of_tests,
    "run": run_of_tests,
    "run with samples": lambda: run_page(SUMMARY, METRICS, EVENTS, plan(), samples=SAMPLES),
    "run that has just begun": lambda: run_page({}, [], [], plan()),
    "run that failed": lambda: run_page({}, METRICS[:1], FAILED, plan()),
    "run in its first step": lambda: run_page({}, METRICS[:1], EVENTS[:1], plan()),
}


# Pages


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_whole_and_fetches_nothing(name: str) -> None:
    html = PAGES[name]()
    page = Page(html)
    assert html.startswith("<!doctype html>")
    assert not {"script", "link", "iframe", "img", "object", "base"} & set(page.tags)
    assert '<meta http-equiv="Content-Security-Policy"\n content="default-src \'none\'; style-src' in html
    assert not {"src", "href", "srcset", "onload"} & {key for key, _ in page.attributes}
    assert not re.search(r"https?:|url\(|@import", html)


def test_the_plan_page_has_every_device_and_task() -> None:
    page = Page(plan_of_tests())
    titles = [value or "" for key, value in page.attributes if key == "title"]
    assert [title.split(" ")[0] for title in titles] == [device.id for device in topology().devices]
    for name, task in plan().tasks.items():
        assert name.replace("_", " ") in page.text
        assert SHORT[name] in page.text
        for stage in (stage for replica in task.replicas for stage in replica.stages):
            assert " ".join(stage.devices) in page.text


def test_the_plan_page_tells_what_each_server_gets() -> None:
    text = Page(plan_of_tests()).text
    assert text.count("KV cache 30.5 GB, 64 sequences") == 1 + 2  # the row of the site, and each replica
    assert text.count("KV cache 9.50 GB, 64 sequences") == 1 + 1


def test_a_box_tells_tasks_memory_and_idleness() -> None:
    titles = {value for key, value in Page(plan_of_tests()).attributes if key == "title"}
    assert "alps/a100-0/0 (a100-40gb): reference inference, actor training; peak 21.5 of 36.8 GB usable" in titles
    assert "jsc/l40s-1/1 (l40s): idle" in titles


def test_the_plan_page_has_times_and_loads() -> None:
    text = Page(plan_of_tests()).text
    for expected in ("41.2 s", "12 of 13", "33.0 s", "weight sync", "alps – lab", "3.50 GB", "1 link without load"):
        assert expected in text
    assert "31.2 s" in text  # 3.5 GB over 0.9 Gbps, and 40 ms


def test_the_explained_page_says_what_binds_and_why() -> None:
    page = Page(explained_of_tests())
    for expected in (
        *("What each time waits for", "link alps–lab", "Memory of the GPUs", "13.5 of 22.1 GB"),
        *("Training stays in one site (alps", "jsc/l40s-1/1 (1 × l40s)", "found by verl", "without alps"),
        *("Worse links Where a link gives 30 % less than was measured, an iteration takes: alps–", "all links"),
        *("As it is simulated", "none found", "4.00 s", "alps to lab"),
    ):
        assert expected in page.text
    labels = [value or "" for key, value in page.attributes if key == "aria-label"]
    assert any(label.startswith("weight sync: link alps–lab 9") for label in labels)


def test_the_slices_of_each_time_fill_its_bar() -> None:
    bars = re.findall(r'<div class="stack" role="img".*?</div>', explained_of_tests(), re.DOTALL)
    assert len(bars) == len(plan().tasks) + 3  # the weight sync, scoring the batch, the iteration
    for bar in bars:
        assert sum(map(float, re.findall(r"width:([\d.]+)%", bar))) == pytest.approx(100, abs=0.1)


def test_a_link_takes_what_its_busier_direction_takes() -> None:
    predicted = replace(plan().predicted, wan_gb_per_iteration={"alps-jsc": 2.0, "jsc-alps": 5.0})
    row = next(iter(link_rows(replace(plan(), predicted=predicted), topology())))
    assert (row.gb, row.seconds) == (7.0, pytest.approx(8.0125))


def test_played_bars_lie_in_the_window_and_tell_how_busy_a_row_is() -> None:
    spans = (
        Span("alps", "alps/a100-0/0", "forward 0", "actor_training", 10.0, 4.0),
        Span("alps", "alps/a100-0/0", "backward 0", "actor_training", 14.0, 2.0),
        Span("alps", "alps/a100-0/1", "forward 0", "actor_training", 12.0, 2.0),
        Span("alps", "to lab", "weights", "link", 18.0, 2.0),
        Span("jsc", "jsc/l40s-0/0", "decode 16", "actor_generation", 0.0, 5.0),
    )
    sync = replace(plan(), algorithm=replace(plan().algorithm, mode="sync", max_staleness=0))
    found = played(sync, Simulated(10.0, 2, True, {}, {}, (), 0, spans))
    assert [(row.name, round(row.busy)) for row in found.rows] == [("alps", 60), ("alps to lab", 20)]
    assert [(bar.left, bar.width, bar.label) for bar in found.rows[0].bars] == [(0, 60, "train")]
    assert [(bar.left, bar.width) for bar in found.rows[1].bars] == [(80, 20)]


def test_a_load_on_a_link_without_a_name_is_shown() -> None:
    loads = {"lab-alps": 1.0, "uplink of jsc": 2.0}
    page = Page(
        plan_page(
            replace(plan(), predicted=replace(plan().predicted, wan_gb_per_iteration=loads)), topology(), workload()
        )
    )
    assert "uplink of jsc" in page.text and "alps – lab" in page.text and "8.93 s" in page.text


def test_the_run_page_has_the_curves_and_figures() -> None:
    page = Page(run_of_tests())
    labels = [value for key, value in page.attributes if key == "aria-label"]
    assert "Reward: from 0.350 to 0.550, lowest 0.350, highest 0.550" in labels
    assert {label.split(":")[0] for label in labels if label} >= {"Reward", "Loss", "KL divergence"}
    assert "Rollout log-prob mismatch (log scale): from 1.0e-06 to 1.0e-06, lowest 1.0e-06, highest 1.0e-06" in labels
    for expected in (
        *("0.350 → 0.550", "1.11 s", "1.31 s", "megatron-core 0.16.1", "vllm 0.32.0"),
        *("123 MB", "52.3 MB", "sha256:abcd", "1.23 MB", "35 supervised steps"),
        *("! process_exited", "4.5 s", "process: rollout-2, code: -9", "finished", "try-20260102-030405"),
    ):
        assert expected in page.text


def test_samples_of_the_first_and_last_step_and_some_between_are_shown_as_they_are() -> None:
    html = run_page(SUMMARY, METRICS, EVENTS, plan(), samples=SAMPLES)
    assert "q1 &lt;b&gt;" in html and "two\n lines" in html
    page = Page(html)
    shown = [number for number in range(1, 40) if f"q{number} <b>" in page.text]
    assert len(shown) == 12 and {1, 39} <= set(shown)
    assert page.text.index("q39 <b>") < page.text.index("q1 <b>")
    assert "-2.50" in page.text and "length" in page.text
    assert "<h2>Samples" in html and "<h2>Samples" not in run_page(SUMMARY, METRICS, EVENTS, plan())


@pytest.mark.parametrize("groups", [1, 3, 6])
def test_what_a_run_goes_on_from_is_in_the_curves_but_not_beside_the_plan(groups: int) -> None:
    seconds = {"actor_generation": 77.0, "iteration": 99.0}
    replicas = {"moon/actor_generation/0": {"seconds": 0.5, "tokens": 100}}
    of_another = {"waits": [{"reward_inference": 66.0}] * groups, "seconds": seconds, "replicas": replicas}
    before = [{**METRICS[0], **of_another, "step": step} for step in range(1, 6)]
    rows = [*before, *({**row, "step": 5 + row["step"]} for row in METRICS)]
    resumed = {"time": 99.0, "source": "alps", "kind": "resumed", "step": 5, "version": 6, "rows": 5, "begun": 0}
    page = Page(run_page({}, rows, [resumed, *EVENTS], plan()))
    labels = [value or "" for key, value in page.attributes if key == "aria-label"]
    assert any(label.startswith("Seconds per step: from 99.0 to 2.00") for label in labels)
    assert "actor generation jsc, lab 33.0 s 2.50 s" in page.text and "in step 6" in page.text
    assert "1.25 s 62.5 % actor generation 1.25 s" in page.text
    assert "66.0 s" not in page.text and "moon/actor_generation/0" not in page.text
    begun = Page(run_page({}, before, [resumed, *EVENTS[:1]], plan())).text
    assert "nothing is measured yet" in begun and "Waiting for" not in begun


def test_without_a_summary_the_measured_seconds_are_medians_of_the_steps() -> None:
    text = Page(run_page({}, METRICS, [], plan())).text
    assert "actor generation jsc, lab 33.0 s 2.50 s 0.0758" in text
    assert "reference inference alps 2.50 s not measured" in text


def spans_of(html: str) -> list[tuple[str, str, float, float]]:
    """Return (name, class, start, end) of every bar of the iteration's chart, in per cent of its width."""
    found = []
    for text in re.findall(r'<svg class="spans" role="img".*?</svg>', html, re.DOTALL):
        svg = ElementTree.fromstring(text)
        for bar in svg.iter("rect"):
            start, width = (float(bar.attrib[key].removesuffix("%")) for key in ("x", "width"))
            found.append((re.split(" at |:", svg.attrib["aria-label"])[0], bar.attrib["class"], start, start + width))
    return found


def test_the_bars_of_the_iteration_stand_where_the_numbers_say() -> None:
    replicas = {"lab/actor_generation/2": {"seconds": 1.0, "tokens": 130}}
    row = {**METRICS[0], "replicas": replicas}
    html = run_page({}, [row], EVENTS[:1], plan())
    assert gantt(plan(), [row]).end_seconds == 50
    bars = {(name, how): (start / 2, end / 2) for name, how, start, end in spans_of(html)}
    assert bars == {
        ("actor generation", "predicted"): (0, 33),
        ("actor generation", "measured"): (0, 1.25),
        ("replica 2", "measured"): (0, 1),
        ("reference inference", "predicted"): (0, 2.5),
        ("reward inference", "predicted"): (0, 3.75),
        ("actor training", "predicted"): (2.5, 23.5),
        ("actor training", "measured"): (1.25, 1.75),
        ("weight sync", "predicted"): (23.5, 24),
        ("weight sync", "measured"): (1.75, 1.875),
        ("iteration", "predicted"): (0, 41.25),
        ("iteration", "measured"): (0, 2),
    }


def test_the_staleness_counts_samples_by_how_far_behind_they_were_drawn() -> None:
    assert staleness_counts(METRICS) == {0: 120, 1: 72}
    labels = [value for key, value in Page(run_of_tests()).attributes if key == "aria-label"]
    assert "Staleness of the samples (versions behind the trainer): 120 of 0, 72 of 1" in labels


def test_replicas_are_compared_by_their_tokens_per_second() -> None:
    rows = [
        {**row, "replicas": {"jsc/actor_generation/0": {"seconds": 0.5, "tokens": 100 * row["step"]}}}
        for row in METRICS
    ]
    assert replica_rates(rows, whole_steps=False) == {"jsc/actor_generation/0": 400.0}
    assert replica_rates(rows, whole_steps=True) == {"jsc/actor_generation/0": 100.0}
    assert "jsc/actor_generation/0 100 tokens/s" in Page(run_page({}, rows, EVENTS, plan())).text
    sync = replace(plan(), algorithm=replace(plan().algorithm, mode="sync", max_staleness=0))
    assert "jsc/actor_generation/0 400 tokens/s" in Page(run_page({}, rows, EVENTS, sync)).text


def test_a_failed_run_tells_its_cause_first() -> None:
    text = Page(run_page({}, METRICS[:1], FAILED, plan())).text
    assert f"The run failed after step 1 no word from {HOSTILE} see logs 1 of 40 steps" in text
    assert "The run failed before its first step ended" in Page(run_page({}, [], FAILED, plan())).text


def test_the_first_event_that_ends_a_run_decides_how_it_ended() -> None:
    cancelled = {**FAILED[-1], "kind": "cancelled", "cause": "cancelled with hetrl cancel"}
    text = Page(run_page({}, METRICS[:1], [*FAILED[:-2], cancelled, *FAILED[-2:]], plan())).text
    assert "The run was cancelled after step 1 cancelled with hetrl cancel 1 of 40 steps" in text
    assert "try cancelled" in text and "The run failed" not in text


def test_before_the_end_metrics_and_events_stand_in_for_the_summary() -> None:
    events = [
        *FAILED[:2],
        {"time": 101.0, "source": "alps", "kind": "member_ready", "member": "a", "engines": {"vllm": "0.32.0"}},
        {"time": 102.0, "source": "alps", "kind": "weights_published", "version": 7, "bytes": 2000, "seconds": 0.5},
        {"time": 103.0, "source": "alps", "kind": "warm_start", "steps": 10, "reward": 0.125},
        {"time": 3700.0, "source": "alps", "kind": "step", "step": 1},
    ]
    text = Page(run_page({}, METRICS, events, plan(), held={"alps": 8, "jsc": 4})).text
    for expected in (
        *("try running", "3 of 40 steps", "1 h 0 min so far", "vllm 0.32.0", "1 weight version, 2.00 kB"),
        *("after 10 supervised steps, at a reward of 0.125", "32.0 samples per second", "alps 8.00, jsc 4.00"),
    ):
        assert expected in text


def test_a_number_that_the_page_does_not_know_gets_a_curve() -> None:
    rows = [{**row, "importance_weight": 1.5, "note": "text"} for row in METRICS]
    text = Page(run_page({}, rows, [], plan())).text
    assert "1 more curve Importance weight" in text and "Note" not in text


def test_the_page_of_a_run_directory_has_the_devices_of_the_topology(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path)
    run.site("alps").mkdir(parents=True)
    gpus = {device.id: device.gpu for device in topology().devices}
    (run.site("alps") / "site.json").write_text(json.dumps({"gpus": gpus, "held": {"alps": 8}}))
    run.events.write_text("".join(json.dumps(event) + "\n" for event in EVENTS))
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in METRICS))
    (run.path / "plan.json").write_text(json.dumps(plan().to_json()))
    write_run_page(run, plan())
    drawn = (tmp_path / "report.html").read_text()
    for name, value in {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}.items():
        monkeypatch.setenv(name, value)
    with (tmp_path / "report.html").open() as reader:
        draw_run_page(run)
        assert reader.read() == drawn, "whoever reads it goes on with the page that it was"
        assert os.fstat(reader.fileno()).st_nlink == 0
    assert (tmp_path / "report.html").read_text() == drawn, "a process of its own draws the same"
    assert not list(tmp_path.glob(".report*"))
    page = Page(drawn)
    titles = [value or "" for key, value in page.attributes if key == "title"]
    assert "GPU-hours held alps 0.0133" in page.text  # 8 devices for the 6 s that the events span
    assert "jsc/l40s-1/1 (l40s): idle" in titles
    assert "alps/a100-0/0 (a100-40gb): reference inference, actor training; peak 21.5 of 36.8 GB usable" in titles


def test_without_a_topology_the_map_has_the_devices_of_the_plan() -> None:
    titles = {value for key, value in Page(run_of_tests()).attributes if key == "title"}
    assert "alps/a100-0/0: reference inference, actor training" in titles


def test_the_picture_names_the_remedy_where_there_is_no_browser(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text("{}")
    (tmp_path / "report.html").write_text(run_of_tests())
    command = [sys.executable, str(ROOT / "docs/picture.py"), str(tmp_path), "--output", str(tmp_path / "a.png")]
    environment = {**os.environ, "PATH": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("error: no headless browser on PATH")
    assert "apt-get install chromium" in done.stderr


def test_a_missing_curve_is_said_to_be_missing() -> None:
    rows = [{key: value for key, value in row.items() if key != "kl"} for row in METRICS]
    assert "KL divergence not recorded in this run" in Page(run_page(SUMMARY, rows, EVENTS, plan())).text


def test_hostile_names_are_escaped_on_pages() -> None:
    bad_plan, bad_topology = hostile()
    job = replace(workload(), actor=replace(workload().actor, name=HOSTILE))
    summary = {
        **SUMMARY,
        "name": HOSTILE,
        "run": HOSTILE,
        "engines": {HOSTILE: HOSTILE},
        "bytes_per_link": {HOSTILE: 1},
    }
    summary |= {"tasks": {HOSTILE: {"predicted_seconds": 1, "measured_seconds": 1}}, "sites": [HOSTILE]}
    events = [{"time": 0, "source": HOSTILE, "sequence": 0, "kind": HOSTILE, HOSTILE: [HOSTILE]}]
    for html in (plan_page(bad_plan, bad_topology, job), run_page(summary, METRICS, events, bad_plan)):
        assert "script" not in Page(html).tags
        assert "<script" not in html
        assert HOSTILE in Page(html).text


def contrast(one: str, other: str) -> float:
    """Return the contrast ratio of two colours (WCAG 2.1, definition of relative luminance)."""

    def luminance(colour: str) -> float:
        parts = [int(colour[index : index + 2], 16) / 255 for index in (1, 3, 5)]
        red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def test_the_text_on_each_colour_can_be_read() -> None:
    assert min(contrast(fill, ink) for fill, ink in PALETTE) >= 4.5
    assert len({fill for fill, _ in PALETTE}) == len(TASKS)


def test_text_and_bars_stand_out_in_light_and_in_dark() -> None:
    css = run_of_tests()
    for theme in re.findall(r":root \{([^}]*--paper[^}]*)\}", css):
        colours = dict(re.findall(r"--([a-z-]+): (#[0-9a-f]{6})", theme))
        for below in ("paper", "card"):
            assert min(contrast(colours[name], colours[below]) for name in ("ink", "soft", "bad", "good")) >= 4.5
            assert contrast(colours["line"], colours[below]) >= 3  # WCAG 2.1, 1.4.11: graphics
    assert len(re.findall(r"--paper:", css)) == 2


def test_the_page_says_what_each_fault_cost() -> None:
    rows = [{**row, "elapsed_seconds": 10.0 * row["step"]} for row in METRICS]
    rows[2] |= {"elapsed_seconds": 75.0, "faults": [HOSTILE]}
    text = Page(run_page({}, rows, EVENTS, plan())).text
    assert "Cost: by how much" not in Page(run_page({}, METRICS, EVENTS, plan())).text
    told = text[text.index("Fault Met in step Cost") :]
    assert told.index(HOSTILE) < told.index("49.0 s") < told.index("Cost: by how much")  # a step takes 2 s, then 10
