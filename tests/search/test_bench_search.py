"""The benches `search` and `scale`: traces, the best known, grown topologies, plots."""

from __future__ import annotations

import json
from collections.abc import Callable
from math import inf
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest
from hypothesis import given, strategies as st

from hetrl.hardware import Link, Node, Site, Topology


@pytest.fixture(scope="module")
def scale(bench_file: Callable[[str], ModuleType]) -> ModuleType:
    return bench_file("scale")


@pytest.fixture(scope="module")
def runs(bench_file: Callable[[str], ModuleType]) -> ModuleType:
    return bench_file("_search_runs")


@pytest.fixture(scope="module")
def plot(bench_file: Callable[[str], ModuleType]) -> ModuleType:
    return bench_file("_plot")


def run(runs: ModuleType, *points: tuple[float, float, int], seed: int = 0):
    return runs.Run("deap", seed, tuple(runs.Point(*point) for point in points), 9.0, 900, (1, 2))


def test_a_run_knows_its_best_plan_at_any_time(runs: ModuleType) -> None:
    one = run(runs, (0.5, 40.0, 50), (2.0, 30.0, 200), (8.0, 20.0, 800))
    assert [one.value_at(seconds) for seconds in (0.1, 0.5, 7.9, 8.0)] == [inf, 40.0, 30.0, 20.0]
    assert [one.value_after(plans) for plans in (49, 200, 900)] == [inf, 30.0, 20.0]
    assert [one.reached(value) for value in (45.0, 30.0, 29.0, 19.0)] == [0.5, 2.0, 8.0, inf]
    assert one.best == 20.0


def test_the_best_known_is_kept_unless_a_run_beats_it(
    runs: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "BEST_KNOWN", tmp_path / "best_known.json")
    first = runs.best_of(None, [run(runs, (1.0, 30.0, 10)), run(runs, (2.0, 25.0, 20), seed=1)], "command")
    assert (first.iteration_seconds, first.seed, first.wall_seconds) == (25.0, 1, 2.0)
    assert runs.best_of(first, [run(runs, (1.0, 25.0, 10))], "other") is first
    better = runs.best_of(first, [run(runs, (1.0, 24.0, 10))], "other")
    runs.keep("some", first)
    runs.keep("another", first)
    runs.keep("some", better)
    kept = json.loads((tmp_path / "best_known.json").read_text())
    assert {name: entry["iteration_seconds"] for name, entry in kept.items()} == {"some": 24.0, "another": 25.0}


def topology() -> Topology:
    sites = (Site("a", (Node("n0", "l4", 2), Node("n1", "l40s", 4))), Site("b", (Node("n0", "l4", 2),)))
    return Topology(sites, (Link(("a", "b"), 7.0, 3.0),))


@given(st.integers(1, 5))
def test_grown_topologies_have_as_many_times_the_gpus(scale: ModuleType, factor: int) -> None:
    nodes, sites = scale.more_nodes(topology(), factor), scale.more_sites(topology(), factor)
    assert len(nodes.devices) == len(sites.devices) == factor * len(topology().devices)
    assert (len(nodes.devices_by_kind), len(sites.devices_by_kind)) == (3, 3 * factor)
    names = [site.name for site in sites.sites]
    links = [sites.link(one, other) for one in names for other in names if one != other]
    assert all(link is not None and (link.delay_ms, link.gbps) == (7.0, 3.0) for link in links)


def test_a_plot_is_svg_with_every_line_and_each_name_once(plot: ModuleType) -> None:
    lines = [
        plot.Line("this & that", "#0072b2", [(0.1, 2.0), (10.0, 1.0)], steps=True),
        plot.Line("this & that", "#0072b2", [(0.2, 3.0), (10.0, 1.5)]),
        plot.Line("nothing", "#d55e00", []),
    ]
    root = ElementTree.fromstring(plot.plot("title", "seconds", lines))
    space = "{http://www.w3.org/2000/svg}"
    drawn = [node.attrib["points"].split() for node in root.iter(f"{space}polyline")]
    assert [len(points) for points in drawn] == [3, 2]
    assert [node.text for node in root.iter(f"{space}text") if node.get("class") == "name"] == ["this & that"]
    for x, y in (point.split(",") for points in drawn for point in points):
        assert 0 <= float(x) <= plot.WIDTH and 0 <= float(y) <= plot.HEIGHT


@given(st.floats(1e-6, 1e6), st.floats(1.0, 1e4))
def test_marks_of_an_axis_enclose_its_values(plot: ModuleType, low: float, ratio: float) -> None:
    marks = plot._marks(low, low * ratio)
    assert marks[0] <= low * (1 + 1e-6) and marks[-1] >= low * ratio * (1 - 1e-6)
    assert marks == sorted(set(marks)) and len(marks) >= 2
