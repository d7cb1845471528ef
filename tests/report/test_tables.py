"""Tables: they fit the terminal and tear no word; rows, names and figures."""

from __future__ import annotations

import re
from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console, RenderableType

from hetrl.hardware import Link, Node, Site, Topology
from hetrl.plan.plan import Replica, Stage
from hetrl.report.rows import TaskRow, servers, task_rows
from hetrl.report.tables import asked_table, links_table, plan_table, sites_table, summary_table
from hetrl.report.text import byte_figure, compact_devices, figure
from hetrl.workload import TASKS
from tests.plan.plan_cases import plan, topology, workload
from tests.report.report_cases import HOSTILE, SUMMARY, hostile


def printed(renderable: RenderableType, width: int = 80) -> list[str]:
    console = Console(file=StringIO(), width=width)
    console.print(renderable)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue().splitlines()


# Rows, names and figures


def test_rows_of_training_are_one_set_of_replicas() -> None:
    base = plan()
    spread = (base.tasks["actor_training"].replicas[0], Replica(24, (Stage(("jsc/l40s-0/0",), (0, 28)),)))
    tasks = {"actor_training": replace(base.tasks["actor_training"], replicas=spread)}
    rows = task_rows(replace(base, tasks=tasks))
    assert rows == [
        TaskRow("actor_training", "alps", spread[0].devices, "2/1×2/1×2", 64, 21.0),
        TaskRow("actor_training", "jsc", spread[1].devices),
    ]


def test_a_row_says_what_its_servers_get_from_the_least_to_the_most() -> None:
    rows = {(row.task, row.site): row.servers for row in task_rows(plan())}
    assert rows["actor_generation", "jsc"] == "KV cache 30.5 GB, 64 sequences"
    assert rows["actor_generation", "lab"] == "KV cache 9.50 GB, 64 sequences"
    assert {servers for (task, _), servers in rows.items() if task != "actor_generation"} == {""}
    one, two, three = plan().tasks["actor_generation"].replicas
    assert servers([one, replace(two, kv_cache_gb=8.0), three]) == "KV cache 8.00 to 30.5 GB, 64 sequences"


def test_rows_follow_the_dataflow() -> None:
    names = list(dict.fromkeys(row.task for row in task_rows(plan())))
    assert names == [task for task in TASKS if task in plan().tasks]


@pytest.mark.parametrize(
    ("devices", "compact"),
    [
        (["alps/a100-0/0", "alps/a100-0/1", "alps/a100-0/2", "alps/a100-0/3"], ["alps/a100-0/0-3"]),
        (["a/n-0/0", "a/n-0/2", "a/n-0/3"], ["a/n-0/0,2-3"]),
        (["a/n0/0", "a/n1/0", "a/n2/0", "a/n4/0"], ["a/n[0-2,4]/0"]),
        (["a/n0/0", "a/n1/0", "a/n1/1"], ["a/n0/0", "a/n1/0-1"]),
        (["a/n-01/0", "a/n-1/0", "a/login/0"], ["a/n-01/0", "a/n-1/0", "a/login/0"]),
        ([], []),
    ],
)
def test_devices_fold(devices: list[str], compact: list[str]) -> None:
    assert compact_devices(devices) == compact


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (41.25, "41.2"), (0.5, "0.500"), (1234.5, "1,234"), (1e-6, "1.0e-06"), (-3, "-3.00"), (None, "–")],
)
def test_figures_have_three_digits(value: float | None, text: str) -> None:
    assert figure(value) == text


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (33e9, "33.0 GB"), (2e15, "2,000 TB")]
)
def test_bytes_are_decimal(count: float, text: str) -> None:
    assert byte_figure(count) == text


# Tables


def test_tables_fit_80_columns_without_tearing_a_word() -> None:
    tables = (
        sites_table(topology(), {"l4": ("training",)}),
        links_table(topology()),
        plan_table(plan(), workload(), topology(), {"l4": ("decode", "training")}),
        asked_table(plan(), topology()),
        summary_table(SUMMARY),
    )
    lines = [line for table in tables for line in printed(table)]
    assert max(map(len, lines)) <= 80
    words = {word for line in lines for word in line.split()}
    assert words >= {"a100-[0-1]", "a100-40gb", "l4*", "megatron,", "vllm", "12.5", "0.900", "8.93"}
    assert words >= {"generation", "reference", "a100-[0-1]/0-3", "l40s-0/0-1", "l4-0/0", "2×2×2", "33.0", "s*"}
    assert words >= {"try-20260102-030405", "megatron-core", "0.16.1,", "alps-jsc", "predicted", "measured"}


def test_what_to_ask_for_is_what_the_jobs_hold_of_each_type_with_its_price() -> None:
    alps, *others = topology().sites
    dear = replace(alps, nodes=tuple(replace(node, price_per_gpu_hour=2.5) for node in alps.nodes))
    lines = printed(asked_table(plan(), replace(topology(), sites=(dear, *others))))
    cells = [re.split(r"\s{2,}", line.strip()) for line in lines]
    assert ["site", "GPU", "asked", "offered", "per GPU-hour", "per hour"] in cells
    assert ["alps", "a100-40gb", "8", "8", "2.50", "20.0"] in cells
    assert ["jsc", "l40s", "4", "4", "0", "0"] in cells  # one is idle, and comes with its node
    assert cells[-2] == ["total", "13", "13", "20.0"]
    free = " ".join(printed(asked_table(plan(), topology())))
    assert "asked" in free and "hour" not in free
    single = tuple(replace(site, allocation="gpu") for site in topology().sites)
    used = replace(
        plan(),
        groups=tuple(replace(one, devices=tuple(set(one.devices) & set(plan().devices))) for one in plan().groups),
    )
    rows = [re.split(r"\s{2,}", line.strip()) for line in printed(asked_table(used, replace(topology(), sites=single)))]
    assert ["jsc", "l40s", "3", "4"] in rows


def test_the_plan_table_has_a_row_per_task_and_site() -> None:
    lines = printed(plan_table(plan(), workload(), topology()))
    cells = [re.split(r"\s{2,}", line.strip()) for line in lines]
    assert ["actor generation", "jsc", "l40s-0/0-1", "1×1×2", "48", "33.0 s"] in cells
    assert ["lab", "l4-0/0", "1×1×1", "16"] in cells
    assert ["actor training", "alps", "a100-[0-1]/0-3", "2×2×2", "64", "21.0 s"] in cells
    assert ["weight sync", "0.500 s"] in cells
    assert "uncalibrated" not in " ".join(lines)


def test_a_star_names_the_phases_that_nothing_measured() -> None:
    inferred = {"a100-40gb": ("training",), "l4": ("training",), "l40s": ("decode", "prefill")}
    text = " ".join(" ".join(printed(plan_table(plan(), workload(), topology(), inferred))).split())
    assert "no measurement stands behind: l40s in decode, prefill; a100-40gb in training" in text
    assert "33.0 s*" in text  # generation, on l40s and l4
    assert "21.0 s*" in text  # training, on a100-40gb
    only = " ".join(" ".join(printed(plan_table(plan(), workload(), topology(), {"l4": ("training",)}))).split())
    assert "*" not in only  # nothing trains there
    sites = " ".join(" ".join(printed(sites_table(topology(), {"l4": ("training",)}))).split())
    assert "no measurement stands behind: l4 in training" in sites


def test_many_loose_devices_wrap_between_names() -> None:
    devices = tuple(f"alps/node-{chr(97 + index)}/{index}" for index in range(8))
    nodes = tuple(Node(f"node-{chr(97 + index)}", "l4", 8) for index in range(8))
    replicas = tuple(Replica(8, (Stage((device,), (0, 28)),)) for device in devices)
    base = plan()
    tasks = {"actor_generation": replace(base.tasks["actor_generation"], replicas=replicas)}
    lines = printed(plan_table(replace(base, tasks=tasks), workload(), Topology((Site("alps", nodes),))))
    words = {word.rstrip(",") for line in lines for word in line.split()}
    assert max(map(len, lines)) <= 80
    assert words >= {device.removeprefix("alps/") for device in devices}


def test_names_are_never_markup_in_tables() -> None:
    bad_plan, bad_topology = hostile()
    wide = printed(plan_table(bad_plan, workload(), bad_topology), 300) + printed(sites_table(bad_topology), 300)
    wide += printed(summary_table({"run": HOSTILE, "sites": [HOSTILE]}), 300)
    assert sum(HOSTILE.replace("/", "|") in line for line in wide) >= 2
    assert any(HOSTILE in line for line in wide)


def test_the_summary_names_the_dearest_faults_first() -> None:
    faults = [
        {"what": what, "step": 1, "seconds": seconds}
        for what, seconds in zip("abcd", (1.0, 9.0, 3.0, 2.0), strict=True)
    ]
    text = "\n".join(printed(summary_table({"run": "r", "faults": faults})))
    assert "9.00 s: b, 3.00 s: c, 2.00 s: d" in text
    assert "lost to faults" not in "\n".join(printed(summary_table({"run": "r", "faults": []})))


def test_the_summary_leaves_out_what_it_does_not_know() -> None:
    text = "\n".join(printed(summary_table({"run": "r", "steps": 3, "warm_start": None})))
    assert "steps" in text and "supervised" not in text and "reward" not in text and "predicted" not in text


def test_links_that_carry_nothing_and_no_links() -> None:
    dead = Topology(topology().sites, (Link(("alps", "jsc"), 1, 0),))
    assert "no way" in "\n".join(printed(links_table(dead)))
    assert printed(links_table(Topology(topology().sites))) == ["Links: none"]
