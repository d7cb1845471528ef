"""A run's summary, metrics and events, a plan whose names are markup, and a reader of pages: for tests of reports."""

from __future__ import annotations

from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

from hetrl.hardware import Node, Site, Topology
from hetrl.plan.plan import Plan, Replica, Stage
from tests.plan.plan_cases import plan

HOSTILE = '<script>alert("1")</script>&[red]'

SUMMARY: dict[str, Any] = {
    "run": "try-20260102-030405",
    "name": "try",
    "steps": 3,
    "reward_first": 0.35,
    "reward_last": 0.55,
    "warm_start": {"steps": 35, "reward": 0.27},
    "samples_per_second": 21.3,
    "tokens_per_second": 43.1,
    "engines": {"megatron-core": "0.16.1", "vllm": "0.32.0"},
    "sites": ["alps", "jsc", "lab"],
    "tasks": {
        "actor_generation": {"predicted_seconds": 1.11, "measured_seconds": 1.31},
        "actor_training": {"predicted_seconds": 1.22, "measured_seconds": 0.92},
    },
    "weight_versions": [{"version": 1, "bytes": 1_234_567, "seconds": 0.1, "digest": "sha256:abcd"}],
    "batch_versions": [[1, {"0": 24, "1": 40}]],
    "bytes_per_link": {"alps-jsc": 123_456_789, "alps-lab": 52_345_678},
    "gpu_hours": {"alps": 0.1, "jsc": 0.02},
    "elapsed_seconds": 30.0,
    "goodput": 0.2,
    "faults": [
        {"what": "taken up behind step 2", "step": 3, "seconds": 18.0},
        {"what": HOSTILE, "step": 2, "seconds": 4.0},
    ],
    "faults_survived": 1,
}


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
        "spans": [
            ["actor_generation", 0.0, 1.25 * step],
            ["actor_training", 1.25 * step, 1.25 * step + 0.5],
            ["weight_sync", 1.25 * step + 0.5, 1.25 * step + 0.625],
        ],
        "waits": [{"actor_training": 0.5, "weight_sync": 0.125}, {"actor_generation": 1.25}, {}],
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


def hostile() -> tuple[Plan, Topology]:
    """Return a plan on one site with one node whose names are markup."""
    name = HOSTILE.replace("/", "|")
    device = f"{name}/{name}/0"
    base = plan()
    tasks = {
        key: replace(task, replicas=(Replica(64, (Stage((device,), (0, 28)),)),)) for key, task in base.tasks.items()
    }
    groups = (replace(base.groups[0], tasks=tuple(tasks), devices=(device,)),)
    predicted = replace(base.predicted, tasks={HOSTILE: 1.0}, wan_gb_per_iteration={HOSTILE: 1.0})
    changed = replace(
        base,
        tasks=tasks,
        groups=groups,
        predicted=predicted,
        site_order=(name,),
        solver=replace(base.solver, name=HOSTILE),
        inputs={HOSTILE: HOSTILE},
    )
    return changed, Topology((Site(name, (Node(name, "l4", 1),)),))
