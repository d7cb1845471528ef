"""Throughput over price: no point of the curve is beaten, the plan at hand is marked, the command prints and draws."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hypothesis import given, strategies as st

from hetrl.cost.objective import COST, Objective
from hetrl.errors import UsageError
from hetrl.explanation import explain
from hetrl.explanation.curve import Curve, Point, curve, front
from hetrl.hardware import Link, Node, Site, Topology
from hetrl.problem import Problem, read_problem
from hetrl.report.reasons import asked_text, curve_reason
from hetrl.search import solve
from launch.cli import main
from tests.launch.launch_cases import ROOT
from tests.search.search_cases import job

EVALUATIONS = 4000


def problem(dear: float = 4.0, cheap: float = 1.0) -> Problem:
    """Two nodes of two A100 and, behind a link, two of two L40S."""
    fast = Site("fast", tuple(Node(f"n{i}", "a100-80gb", 2, price_per_gpu_hour=dear) for i in range(2)))
    slow = Site("slow", tuple(Node(f"n{i}", "l40s", 2, price_per_gpu_hour=cheap) for i in range(2)))
    return Problem(Topology((fast, slow), (Link(("fast", "slow"), 5.0, 5.0),)), job(algorithm="grpo", staleness=1))


def found(asked: Problem, objective: Objective) -> Curve:
    """Return the curve around a plan that was searched for longer than its points."""
    plan = solve(replace(asked, objective=objective), "sha-ea", 600.0, 1, evaluations=8 * EVALUATIONS)
    return curve(plan, asked, 600.0, evaluations=EVALUATIONS)


def matches(one: Point, other: Point) -> bool:
    """Whether a point is no dearer and no slower than another."""
    return one.price_per_hour <= other.price_per_hour and one.samples_per_second >= other.samples_per_second


def beats(one: Point, other: Point) -> bool:
    return matches(one, other) and not matches(other, one)


figures = st.sampled_from([0.0, 1.0, 1.5, 2.0, 3.0, 8.0])


@given(st.lists(st.builds(Point, figures, figures, figures, st.just(()), st.booleans()), min_size=1, max_size=12))
def test_the_front_is_what_no_point_beats(points: list[Point]) -> None:
    kept = front(points)
    assert not any(beats(one, other) for one in points for other in kept)
    prices = [point.price_per_hour for point in kept]
    assert prices == sorted(set(prices))
    assert all(any(matches(other, point) for other in kept) for point in points)


def test_the_curve_reaches_from_the_cheapest_to_the_fastest_plan() -> None:
    asked = problem()
    told = found(asked, Objective(COST, budget_per_hour=8.0))
    assert not any(beats(one, other) for one in told.points for other in told.points)
    assert told.points[0].price_per_hour == 2.0  # a node of two L40S is the least there is
    fastest = solve(asked, "sha-ea", 600.0, 0, evaluations=EVALUATIONS).predicted
    assert told.points[-1].samples_per_second >= fastest.samples_per_second * 0.98  # searches of another objective
    assert told.on_curve and [point for point in told.points if point.this_plan] == [told.own]
    for point in told.points:
        assert sum(one.price_per_hour for one in point.asked) == pytest.approx(point.price_per_hour)
        hours = 128 / point.samples_per_second / 3600
        assert point.price_per_iteration == pytest.approx(point.price_per_hour * hours)
    assert told == found(asked, Objective(COST, budget_per_hour=8.0))


def test_a_plan_that_is_beaten_is_off_the_curve_and_says_by_what() -> None:
    asked = problem()
    plan = solve(asked, "verl", 5.0, 0)
    told = curve(plan, asked, 600.0, evaluations=EVALUATIONS)
    assert not told.on_curve and any(beats(point, told.own) for point in told.points)
    assert "is not among them: " in curve_reason(told)


def test_free_gpus_are_the_first_point_and_no_prices_an_error() -> None:
    told = found(problem(cheap=0.0), Objective())
    assert told.points[0].price_per_hour == 0.0
    assert asked_text(told.points[0].asked).startswith("slow ")
    with pytest.raises(UsageError, match="set price_per_gpu_hour in the sites' files"):
        found(problem(0.0, 0.0), Objective())


def test_the_command_prints_and_draws_the_curve(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = yaml.safe_load((ROOT / "configs/paper-single-region.yaml").read_text())
    sites = yaml.safe_load((ROOT / "topology/scenarios/small-16.yaml").read_text())
    for site, price in zip(sites["sites"], (3.5, 1.25), strict=True):
        site["price_per_gpu_hour"] = price
    (tmp_path / "sites.yaml").write_text(yaml.safe_dump(sites))
    document["model"]["architecture"] = document["reward"]["architecture"] = "qwen3-0.6b"
    document["topology"]["scenario"] = str(tmp_path / "sites.yaml")
    config, path, page = (tmp_path / name for name in ("config.yaml", "plan.json", "plan.html"))
    config.write_text(yaml.safe_dump(document))
    plan = solve(read_problem(config), "verl", 1, 0)
    path.write_text(json.dumps(plan.to_json()))
    assert main(["explain", str(path), "--budgets", "0.3", "--html", str(page)]) == 0
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines())) <= 80
    assert "Throughput over price" in said and "GPUs to ask for" in said
    html = page.read_text()
    assert all(text in html for text in ("Throughput over price", "What to ask for", "price per hour", ">this plan<"))


def test_a_curve_becomes_json() -> None:
    asked = problem()
    plan = solve(asked, "verl", 5.0, 0)
    told = curve(plan, asked, 600.0, evaluations=EVALUATIONS)
    document = json.loads(json.dumps(replace(explain(plan, asked), curve=told).to_json()))
    assert [point["price_per_hour"] for point in document["curve"]["points"]] == [p.price_per_hour for p in told.points]
    assert document["curve"]["own"]["asked"][0] == {
        "site": "fast",
        "gpu": "a100-80gb",
        "gpus": 4,
        "offered": 4,
        "price_per_gpu_hour": 4.0,
    }
