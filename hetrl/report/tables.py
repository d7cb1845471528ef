"""Tables for the terminal, readable at 80 columns; each function returns a rich renderable and prints nothing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from itertools import groupby
from typing import Any

from rich import box
from rich.console import Group as Stack, RenderableType
from rich.table import Table
from rich.text import Text

from hetrl.cost.charges import asked_for, has_prices
from hetrl.cost.efficiency import Efficiency
from hetrl.describe.measured import Measured
from hetrl.gpus import gpu_type
from hetrl.hardware import Node, Site, Topology
from hetrl.plan.plan import Plan
from hetrl.report.rows import task_rows
from hetrl.report.text import byte_figure, compact_devices, figure, spoken
from hetrl.workload import ACTOR_GENERATION, Workload

Phases = Mapping[str, Collection[str]]  # of GPU types: those whose speed is inferred, not measured
_NONE: Phases = {}
_MOST_FAULTS = 3  # of a run, the dearest


def _uncalibrated(types: Phases) -> str:
    """Return what the star of these types stands for."""
    named = "; ".join(f"{gpu} in {', '.join(phases)}" for gpu, phases in types.items())
    return f"* uncalibrated, no measurement stands behind: {named}"


def sites_table(topology: Topology, uncalibrated: Phases = _NONE) -> RenderableType:
    """Return a row per site and kind of node; GPU types in `uncalibrated` carry a star."""
    table = new_table("Sites", "site", "nodes", "GPUs", "memory", "network", "engines")
    starred: dict[str, Collection[str]] = {}
    for site in topology.sites:
        for index, nodes in enumerate(_alike(site)):
            node, gpu = nodes[0], nodes[0].gpu_type
            if star := node.gpu in uncalibrated:
                starred[node.gpu] = uncalibrated[node.gpu]
            head, tail = ("", "") if index else (site.name, ", ".join(site.engines))
            gpus = f"{len(nodes)} × {node.gpus} {node.gpu}{'*' if star else ''}"
            names = _folded(site.name, nodes)
            add_row(table, head, names, gpus, f"{gpu.memory_gb:g} GB", f"{figure(node.nic_gbps)} Gbps", tail)
    return _noted(table, _uncalibrated(starred) if starred else "")


def _alike(site: Site) -> Iterator[list[Node]]:
    """Yield runs of equal nodes."""
    for _, nodes in groupby(site.nodes, key=lambda node: (node.gpu, node.gpus, node.nic_gbps)):
        yield list(nodes)


def _folded(site: str, nodes: list[Node]) -> str:
    names = compact_devices(f"{site}/{node.name}/0" for node in nodes)
    return ", ".join(name.removeprefix(f"{site}/").removesuffix("/0") for name in names)


def links_table(topology: Topology) -> RenderableType:
    """Return a row per link: delay one way, bandwidth in one direction, and what 1 GB takes."""
    table = new_table("Links", "between", "and", "delay (one way)", "bandwidth", "1 GB takes")
    for link in topology.links:
        seconds = f"{figure(link.delay_ms / 1e3 + 8 / link.gbps)} s" if link.gbps > 0 else "no way"
        add_row(table, *link.between, f"{figure(link.delay_ms)} ms", f"{figure(link.gbps)} Gbps", seconds)
    return table if topology.links else Text("Links: none")


def phases_of(task: str) -> tuple[str, ...]:
    """Return the phases that a task's seconds rest on (`hetrl.gpus.PHASES`)."""
    if task == ACTOR_GENERATION:
        return ("decode", "prefill")
    return ("training",)


def _inferred(task: str, devices: Collection[str], topology: Topology, uncalibrated: Phases) -> dict[str, list[str]]:
    """Return the GPU types among a task's devices of which a phase that it rests on is uncalibrated, with these."""
    found: dict[str, list[str]] = {}
    for gpu in sorted({topology.device_by_id[device].gpu for device in devices}):
        if phases := [phase for phase in phases_of(task) if phase in uncalibrated.get(gpu, ())]:
            found[gpu] = phases
    return found


def plan_table(plan: Plan, workload: Workload, topology: Topology, uncalibrated: Phases = _NONE) -> RenderableType:
    """Return a row per task and site: devices, TP×PP×DP, samples, predicted seconds.

    Seconds that rest on a phase of a GPU type in `uncalibrated` carry a star.
    """
    table = new_table("Plan", "task", "site", "devices", "TP×PP×DP", "samples", "predicted")
    previous, starred = "", defaultdict[str, dict[str, None]](dict)
    for row in task_rows(plan):
        star = _inferred(row.task, plan.tasks[row.task].devices, topology, uncalibrated)
        for gpu, phases in star.items():
            starred[gpu] |= dict.fromkeys(phases)
        seconds = "" if row.seconds is None else f"{figure(row.seconds)} s{'*' if star else ''}"
        devices = ", ".join(name.split("/", 1)[1] for name in compact_devices(row.devices))
        name = spoken(row.task) if row.task != previous else ""
        samples = "" if row.samples is None else str(row.samples)
        add_row(table, name, row.site, devices, row.parallelism, samples, seconds)
        previous = row.task
    for name, value in plan.predicted.tasks.items():
        if name not in plan.tasks:
            add_row(table, spoken(name), "", "", "", "", f"{figure(value)} s")
    note = (
        f"{workload.algorithm.upper()}, {workload.mode}: an iteration of {workload.samples} samples takes "
        f"{figure(plan.predicted.iteration_seconds)} s ({figure(plan.predicted.samples_per_second)} samples/s) on "
        f"{len(plan.devices)} of {len(topology.devices)} devices, as predicted by our model; solver {plan.solver.name}"
    )
    return _noted(table, f"{note}\n{_uncalibrated(starred)}" if starred else note)


def asked_table(plan: Plan, topology: Topology) -> RenderableType:
    """Return what to ask for: a row per site and GPU type that the jobs hold, with prices where there are any."""
    asked, priced = asked_for(plan, topology), has_prices(topology)
    prices = ("per GPU-hour", "per hour") if priced else ()
    table = new_table("What to ask for", "site", "GPU", "asked", "offered", *prices)
    for one in asked:
        cells = (one.site, one.gpu, f"{one.gpus}", f"{one.offered}")
        add_row(table, *cells, *(figure(price) for price in (one.price_per_gpu_hour, one.price_per_hour) if priced))
    total = ("", figure(sum(one.price_per_hour for one in asked))) if priced else ()
    add_row(table, "total", "", f"{sum(one.gpus for one in asked)}", f"{len(topology.devices)}", *total)
    return table


def summary_table(summary: Mapping[str, Any]) -> RenderableType:
    """Return what a run's `summary.json` says: its figures, then predicted and measured seconds per task."""
    table = new_table("Summary", "what", "value", headers=False)
    for what, value in _summary_lines(summary):
        add_row(table, what, value)
    tasks = new_table("Seconds per step", "task", "predicted", "measured")
    for name, seconds in summary.get("tasks", {}).items():
        pair = (seconds.get("predicted_seconds"), seconds.get("measured_seconds"))
        add_row(tasks, spoken(name), *(f"{figure(value)} s" for value in pair))
    return Stack(table, tasks) if summary.get("tasks") else table


def _summary_lines(summary: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the lines that the summary has values for."""
    if "run" in summary:
        yield "run", str(summary["run"])
    if "steps" in summary:
        yield "steps", str(summary["steps"])
    if summary.get("warm_start"):
        start = summary["warm_start"]
        yield "supervised start", f"{start['steps']} steps to reward {figure(start['reward'])}"
    if "reward_first" in summary:
        yield "reward", f"{figure(summary['reward_first'])} → {figure(summary['reward_last'])}"
    told = ((key, summary.get(f"{key}_per_second")) for key in ("samples", "tokens"))
    rates = [f"{figure(rate)} {key}/s" for key, rate in told if rate is not None]
    for what, value in (
        ("throughput", ", ".join(rates)),
        ("engines", ", ".join(f"{name} {version}" for name, version in summary.get("engines", {}).items())),
        ("sites", ", ".join(summary.get("sites", ()))),
        ("weight versions", _versions(summary.get("weight_versions", ()))),
        ("over the links", ", ".join(f"{k} {byte_figure(v)}" for k, v in summary.get("bytes_per_link", {}).items())),
        ("GPU-hours", ", ".join(f"{site} {figure(hours)}" for site, hours in summary.get("gpu_hours", {}).items())),
    ):
        if value:
            yield what, value
    if "goodput" in summary:
        whole = figure(summary["elapsed_seconds"])
        yield "goodput", f"{100 * summary['goodput']:.0f} % of {whole} s went into the steps that count"
    if faults := sorted(summary.get("faults", ()), key=lambda one: -one["seconds"]):
        yield "lost to faults", ", ".join(f"{figure(one['seconds'])} s: {one['what']}" for one in faults[:_MOST_FAULTS])
    if "faults_survived" in summary:
        yield "faults survived", str(summary["faults_survived"])


def _versions(versions: Collection[Mapping[str, Any]]) -> str:
    return f"{len(versions)}, {byte_figure(sum(entry['bytes'] for entry in versions))}" if versions else ""


def measured_tables(measured: Measured, before: Efficiency) -> RenderableType:
    """Return what a machine reached, the shares that follow, the check of sizes not fitted, and what is missing.

    `before` are the shares that the cost model would take without this file.
    """
    models = {str(one.question["architecture"]) for one in measured.measurements if "architecture" in one.question}
    layers = f"; layers of {', '.join(sorted(models))}" if models else ""
    reached = new_table(f"{measured.gpu}: {measured.machine['device']}{layers}", "what", "rate", "median", "spread")
    for one in measured.measurements:
        unit, size = _RATE_UNITS[one.unit]
        rate = f"{figure(one.rate / size)} {unit}"
        add_row(reached, one.name, rate, _milliseconds(one.median_seconds), f"{one.spread:.0%}")
    parts: list[RenderableType] = [reached, _shares_table(measured, before)]
    if measured.exchange is not None:
        link = measured.exchange
        fitted = f"all-reduce: {figure(2 * link.delay_ms)} ms + bytes at {figure(link.gbps)} Gbps"
        parts.append(Text(f"{fitted} ({link.backend}, {link.ranks} ranks)\n"))
    if measured.checks:
        checks = new_table("Prediction of sizes not used in the fit", "layer", "measured", "predicted", "error")
        for check in measured.checks:
            times = map(_milliseconds, (check.measured_seconds, check.predicted_seconds))
            add_row(checks, check.name, *times, f"{check.error:+.0%}")
        parts.append(checks)
    return Stack(*parts, *(Text(f"not measured: {one.kind}: {one.why}") for one in measured.skipped))


_RATE_UNITS = {"flops": ("GFLOP/s", 1e9), "bytes": ("GB/s", 1e9), "tokens": ("tokens/s", 1.0)}


def _milliseconds(seconds: float) -> str:
    return f"{figure(seconds * 1e3)} ms"


def _shares_table(measured: Measured, before: Efficiency) -> Table:
    table = new_table("Shares of the catalogue's figures", "phase", "share", "before", "of")
    entry = gpu_type(measured.gpu)
    for phase, share in measured.shares.items():
        of = f"{entry.memory_gb_per_s:g} GB/s" if phase == "decode" else f"{entry.peak_tflops:g} TFLOP/s"
        source = "inferred" if phase in before.inferred else "calibrated"
        add_row(table, phase, figure(share), f"{figure(getattr(before, phase))} {source}", of)
    return table


_RIGHT = {"memory", "network", "delay (one way)", "bandwidth", "1 GB takes", "samples", "predicted", "measured"}
_RIGHT |= {"rate", "median", "spread", "share", "error", "alone", "adds", "per iteration", "takes"}
_RIGHT |= {
    "of the iteration",
    "of usable",
    "iteration",
    "change",
    "asked",
    "offered",
    "per GPU-hour",
    "per hour",
    "samples/s",
}
_MAY_WRAP = {"what", "GPUs to ask for", "layer", "nodes", "engines", "devices", "value", "waits for"}


def new_table(title: str, *columns: str, headers: bool = True) -> Table:
    """Return an empty table; what its columns are called decides how they are set."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, show_header=headers)
    for column in columns:
        justify = "right" if column in _RIGHT else "left"
        table.add_column(column, justify=justify, no_wrap=column not in _MAY_WRAP)  # type: ignore[arg-type]
    return table


def add_row(table: Table, *cells: str) -> None:
    """Add a row of plain text: names are never read as markup."""
    table.add_row(*(Text(cell) for cell in cells))


def _noted(table: Table, note: str) -> RenderableType:
    return Stack(table, Text(note)) if note else table
