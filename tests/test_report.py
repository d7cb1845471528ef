"""The pages of a plan and a run: everything is there, names cannot inject markup, nothing is fetched."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetrl.report.chart import LEFT, RIGHT, WIDTH, line_chart, nice_ticks, tick_label
from hetrl.report.page import PALETTE, SHORT
from hetrl.report.plan_page import plan_page
from hetrl.report.run_page import run_page
from hetrl.workload import TASKS
from tests.plan_cases import plan, topology, workload
from tests.report_cases import HOSTILE, SUMMARY, hostile

METRICS: list[dict[str, Any]] = [
    {
        "step": step,
        "reward": 0.25 + step / 10,
        "loss": -0.5 / step,
        "kl": 1e-4 * step,
        "clip_fraction": 0.01,
        "grad_norm": 1.5,
        "weight_version": step,
        "versions": {str(step - 1): 24, str(step): 40},
        "samples": 64,
        "tokens": 130,
        "mismatch": 1e-6,
        "seconds": {"actor_generation": 1.25 * step, "actor_training": 0.5, "weight_sync": 0.125, "iteration": 2.0},
        "weight_bytes": 1_234_567,
    }
    for step in (1, 2, 3)
]
EVENTS: list[dict[str, Any]] = [
    {"time": 100.0, "source": "launcher", "sequence": 0, "kind": "submitted", "site": "alps"},
    {"time": 104.5, "source": "launcher", "sequence": 1, "kind": "process_exited", "process": "rollout-2", "code": -9},
    {"time": 105.0, "source": "alps", "sequence": 0, "kind": "step", "step": 1},
    {"time": 106.0, "source": "alps", "sequence": 1, "kind": "finished"},
]


class Page(HTMLParser):
    """Collects the tags, attributes and text of a page and refuses tags that are not closed."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.words: list[str] = []
        self._open: list[str] = []
        self.feed(page)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in ("meta", "br"):
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] != "style":
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def plan_of_tests() -> str:
    return plan_page(plan(), topology(), workload())


def run_of_tests() -> str:
    return run_page(SUMMARY, METRICS, EVENTS, plan())


PAGES = {
    "plan": plan_of_tests,
    "run": run_of_tests,
    "run that has just begun": lambda: run_page({}, [], [], plan()),
    "run in its first step": lambda: run_page({}, METRICS[:1], EVENTS[:1], plan()),
}


# Pages


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_whole_and_fetches_nothing(name: str) -> None:
    html = PAGES[name]()
    page = Page(html)
    assert html.startswith("<!doctype html>")
    assert not {"script", "link", "iframe", "img", "object", "base"} & set(page.tags)
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


def test_a_box_tells_tasks_memory_and_idleness() -> None:
    titles = {value for key, value in Page(plan_of_tests()).attributes if key == "title"}
    assert "alps/a100-0/0 (a100-40gb): reference inference, actor training; peak 21.5 of 36.8 GB usable" in titles
    assert "jsc/l40s-1/1 (l40s): idle" in titles


def test_the_plan_page_has_times_and_loads() -> None:
    text = Page(plan_of_tests()).text
    for expected in ("41.2 s", "12 of 13", "33.0 s", "weight sync", "alps – lab", "3.50 GB", "1 link without load"):
        assert expected in text
    assert "31.2 s" in text  # 3.5 GB over 0.9 Gbps, and 40 ms


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
    for expected in (
        *("0.350 → 0.550", "1.11 s predicted", "1.31 s measured", "megatron-core 0.16.1", "vllm 0.32.0"),
        *("123 MB", "52.3 MB", "sha256:abcd", "24 of version 0", "40 of version 1", "35 supervised steps"),
        *("! process_exited", "4.5 s", "process: rollout-2, code: -9", "finished", "try-20260102-030405"),
    ):
        assert expected in page.text


def test_without_a_summary_the_measured_seconds_are_medians_of_the_steps() -> None:
    text = Page(run_page({}, METRICS, [], plan())).text
    assert "33.0 s predicted" in text and "2.50 s measured" in text
    assert "2.50 s predicted" in text and "not measured" in text  # the reference task


def test_a_missing_curve_is_said_to_be_missing() -> None:
    rows = [{key: value for key, value in row.items() if key != "kl"} for row in METRICS]
    assert "KL divergence not recorded" in Page(run_page(SUMMARY, rows, EVENTS, plan())).text


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


# Charts


@given(st.floats(-1e12, 1e12), st.floats(-1e12, 1e12), st.integers(2, 10))
def test_ticks_enclose_the_values_and_are_few(one: float, other: float, count: int) -> None:
    low, high = sorted((one, other))
    marks = nice_ticks(low, high, count)
    slack = 1e-6 * (marks[-1] - marks[0])
    assert marks[0] <= low + slack and marks[-1] >= high - slack
    assert 2 <= len(marks) <= count + 2
    assert marks == sorted(set(marks))


@pytest.mark.parametrize(
    ("low", "high", "marks"),
    [
        (0, 1, [0, 0.5, 1]),
        (-3, 6, [-5, 0, 5, 10]),
        (7, 7, [2, 4, 6, 8, 10, 12]),
        (0, 4e-14, [0, 1e-14, 2e-14, 3e-14, 4e-14]),
    ],
)
def test_ticks_are_round(low: float, high: float, marks: list[float]) -> None:
    assert nice_ticks(low, high, 5) == marks


def test_tick_labels_have_the_digits_that_they_need() -> None:
    assert [tick_label(mark, [0, 0.05, 0.1]) for mark in (0, 0.05, 0.1)] == ["0.00", "0.05", "0.10"]
    assert [tick_label(mark, [0, 5e-7]) for mark in (0, 5e-7)] == ["0", "5e-7"]
    assert tick_label(1.5e6, [0, 1.5e6]) == "1.5e6"


def test_a_chart_stays_inside_and_breaks_at_gaps() -> None:
    points = [(1.0, 0.5), (2.0, 0.75), (3.0, None), (4.0, math.nan), (5.0, 1.0), (6.0, 0.25)]
    chart = line_chart("x", points)
    assert [len(line.split()) for line in chart.lines] == [2, 2]
    assert len(chart.dots) == 4
    assert all(LEFT <= x <= WIDTH - RIGHT for x, _ in chart.dots)
    assert [x for x, _ in chart.dots] == sorted(x for x, _ in chart.dots)
    assert min(chart.dots, key=lambda dot: dot[1])[0] == chart.dots[2][0]  # up is more


def test_many_points_have_no_dots() -> None:
    assert line_chart("x", [(float(x), float(x)) for x in range(1000)]).dots == ()
