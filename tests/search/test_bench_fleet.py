"""The bench `fleet`: what it compares keeps its bounds, and what its page says of the gains."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest


@pytest.fixture(scope="module")
def bench(bench_file: Callable[[str], ModuleType]) -> ModuleType:
    return bench_file("fleet")


@pytest.fixture(scope="module")
def pages(bench_file: Callable[[str], ModuleType]) -> ModuleType:
    return bench_file("_fleet_page")


def small(bench: ModuleType) -> Any:
    """Return the bench's knobs with a job and searches that take no time."""
    knobs = bench.read_yaml(bench.HERE / "fleet.yaml", bench.Knobs)
    batch = knobs.batch.model_copy(update={"samples": 64, "prompt_tokens": 128, "response_tokens": 256})
    return knobs.model_copy(update={"batch": batch, "response_mean": 200.0, "seeds": 1, "evaluations": 3000})


@pytest.mark.parametrize("offer", ["list", "apart"])
def test_what_is_compared_keeps_its_bounds_and_one_fleet_is_of_one_type(bench: ModuleType, offer: str) -> None:
    cell = bench.compare(bench.Case(small(bench), offer, "qwen2.5-1.5b", 110.1))
    for bought in (cell.single, cell.mixed):
        assert 0 < bought.price_per_hour <= 110.1
    for bought in (cell.single, cell.cheap_single):
        assert len(bought.gpus) == 1
    for bought in (cell.cheap_single, cell.cheap_mixed):
        assert bought.samples_per_second[0] >= cell.single.samples_per_second[0] * (1 - 1e-6)
        assert bought.price_per_iteration[0] == pytest.approx(
            bought.price_per_hour / 3600 * 64 / bought.samples_per_second[0]
        )
    assert cell.cheap_single.price_per_iteration[0] <= cell.single.price_per_iteration[0] * (1 + 1e-6)


def test_one_type_alone_keeps_its_sites_and_their_links(bench: ModuleType) -> None:
    topology = bench.Case(small(bench), "apart", "qwen2.5-7b", 1.0).problem.topology
    alone = bench.only(topology, "h20")
    assert [site.name for site in alone.sites] == ["memory"] and alone.links == ()
    both = tuple(replace(site, nodes=topology.sites[0].nodes) for site in topology.sites)
    assert bench.only(replace(topology, sites=both), "h100").links == topology.links


def test_the_page_says_whether_the_papers_gains_are_reached(bench: ModuleType, pages: ModuleType) -> None:
    def bought(rate: float, played: float, price: float) -> Any:
        return pages.Bought({"h20": 8}, 18.32, (rate, played), (price, price / 2))

    one, other = bought(2.0, 2.0, 3.0), bought(3.0, 2.5, 2.0)
    cell = pages.Cell("apart", "qwen2.5-7b", 110.1, one, other, one, other)
    assert (cell.throughput, cell.price) == ((1.5, 1.25), (1.5, 1.5))
    topology = bench.Case(small(bench), "apart", "qwen2.5-7b", 1.0).problem.topology
    page = pages.page([cell], {"apart": ("Apart", "Assumed", topology), "list": ("List", "Listed", topology)}, 8, 1000)
    assert "| 8 × h20 at 18.3 | 2.00 / 2.00 | 8 × h20 at 18.3 | 3.00 / 2.50 | 1.50 / 1.25 |" in page
    said = "the paper's 1.50: 1.50 to 1.50 times as predicted (reached), 1.25 to 1.25 times as played (not reached)"
    assert said in page and "Listed" not in page
    assert "2.23 and 3.59 times as much" in page and "(2.23 × 3.59 − 1) / (2.23 + 3.59 − 2) = 1.83 times" in page
