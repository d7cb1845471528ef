"""An explanation for the terminal, readable at 80 columns."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group as Stack, RenderableType
from rich.table import Table
from rich.text import Text

from hetrl.cost.objective import SECONDS
from hetrl.explanation import Curve, Explanation, Study
from hetrl.explanation.memory import Memory
from hetrl.hardware import Topology
from hetrl.report import reasons
from hetrl.report.rows import link_rows
from hetrl.report.tables import add_row, new_table
from hetrl.report.text import figure, spoken
from hetrl.workload import ITERATION

_BAR = 16


def explanation_tables(found: Explanation, topology: Topology) -> RenderableType:
    """Return all that is known of a plan: time, links, memory, and in words why it is so."""
    parts: list[RenderableType] = [_time_table(found)]
    if any(row.gb for row in link_rows(found.plan, topology)):
        parts.append(_link_table(found, topology))
    parts.append(_memory_table(found.memory))
    for title, lines in _paragraphs(found):
        parts += [Text(title, style="italic"), *(Text(f"  {line}", overflow="fold") for line in lines), Text("")]
    if found.curve is not None:
        parts += [_curve_table(found.curve), Text(reasons.curve_reason(found.curve)), Text("")]
    if found.study is not None:
        parts.append(_what_if_table(found.study))
    return Stack(*parts)


def _time_table(found: Explanation) -> Table:
    predicted = found.plan.predicted
    title = f"An iteration takes {figure(predicted.iteration_seconds)} s, as predicted by our model"
    table = new_table(title, "task", "alone", "adds", "waits for")
    adds = {part.name: part.seconds for part in found.path}
    for name in predicted.tasks:
        alone, added = predicted.tasks[name], adds.get(name)
        add_row(
            table,
            spoken(name),
            *(f"{figure(v)} s" for v in (alone, added)),
            reasons.waits_for(found.binds.get(name, ())),
        )
    for name in (name for name in adds if name not in predicted.tasks):
        add_row(table, name, "", f"{figure(adds[name])} s", "")
    whole = figure(predicted.iteration_seconds)
    add_row(table, ITERATION, "", f"{whole} s", reasons.waits_for(found.binds.get(ITERATION, ())))
    return table


def _link_table(found: Explanation, topology: Topology) -> Table:
    table = new_table("Links", "between", "bandwidth", "per iteration", "takes", "of the iteration")
    for row in sorted(link_rows(found.plan, topology), key=lambda row: -row.gb):
        if row.gb:
            seconds = "–" if row.seconds is None else f"{figure(row.seconds)} s"
            share = "" if row.seconds is None else f"{figure(row.share)} %"
            add_row(table, row.between, f"{figure(row.gbps)} Gbps", f"{figure(row.gb)} GB", seconds, share)
    return table


def _memory_table(rows: tuple[Memory, ...]) -> Table:
    table = new_table("Memory of each GPU, at its peak", "site", "GPUs", "of usable", "", "what")
    for row in rows:
        filled = min(round(_BAR * row.peak_gb / row.usable_gb), _BAR)
        bar = "█" * filled + "░" * (_BAR - filled)
        peak = f"{figure(row.peak_gb)} / {figure(row.usable_gb)} GB"
        what = ", ".join(f"{spoken(s.task)} {figure(s.gb)}{'' if s.resident else ' while it runs'}" for s in row.shares)
        add_row(table, row.site, f"{len(row.devices)} × {row.gpu}", peak, bar, what)
    return table


def _paragraphs(found: Explanation) -> Iterator[tuple[str, list[str]]]:
    seconds = found.plan.predicted.iteration_seconds
    if found.training is not None:
        yield "Training", [reasons.training_reason(found.training)]
    if found.worse_links:
        yield "Worse links", [reasons.worse_links_reason(found.worse_links, seconds)]
    if found.idle:
        yield "Idle GPUs", [reasons.idle_reason(idle, seconds) for idle in found.idle]
    if found.study is not None and found.study.runner_up is not None:
        yield "Runner-up", [reasons.runner_up_reason(found.study.runner_up, seconds)]


def _curve_table(curve: Curve) -> Table:
    columns = ("per hour", "samples/s", "per iteration", "GPUs to ask for", "")
    table = new_table("Throughput over price", *columns)
    for point in curve.points:
        figures = (point.price_per_hour, point.samples_per_second, point.price_per_iteration)
        mine = "this plan" if point.this_plan else ""
        add_row(table, *map(figure, figures), reasons.asked_text(point.asked), mine)
    return table


def _what_if_table(study: Study) -> Table:
    other = [] if study.of_seconds else [study.measure.name]
    table = new_table("What if", "what", "iteration", *other, "change", "by")
    for answer in study.what_ifs:
        iteration = reasons.value_text(answer.seconds, SECONDS)
        value = [reasons.value_text(answer.value, study.measure)] if other else []
        add_row(
            table,
            answer.name,
            iteration,
            *value,
            reasons.change_text(answer.value, study.value),
            reasons.answer_text(answer),
        )
    return table
