"""The page of the bench `fleet`: what is offered, what is bought, and the gains beside those of AReaL-Hex."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from hetrl.cost.charges import offered
from hetrl.gpus import gpu_type
from hetrl.hardware import Topology
from hetrl.report.text import figure

# AReaL-Hex (arXiv 2511.00796), abstract: "up to", over fleets of one GPU type.
PAPER_THROUGHPUT, PAPER_PRICE = 1.50, 1.46

Offers = Mapping[str, tuple[str, str, Topology]]  # title, where the prices are from, what there is
Pair = tuple[float, float]  # predicted, played


@dataclass(frozen=True)
class Bought:
    """What a plan takes of the offer, by GPU type, and does; pairs are as predicted, and as played."""

    gpus: Mapping[str, int]
    price_per_hour: float
    samples_per_second: Pair
    price_per_iteration: Pair

    @property
    def text(self) -> str:
        """Return the GPUs and their price."""
        return f"{' + '.join(f'{count} × {gpu}' for gpu, count in self.gpus.items())} at {self.price_per_hour:.1f}"


Row = tuple[str, str, Bought, Bought, Pair]  # model, the bound that is kept, of one type, mixed, gain


@dataclass(frozen=True)
class Cell:
    """The best fleet of one type and the mixed one: at an equal budget, and at the throughput of the first."""

    offer: str
    model: str
    budget_per_hour: float
    single: Bought
    mixed: Bought
    cheap_single: Bought
    cheap_mixed: Bought

    @property
    def throughput(self) -> Pair:
        """Return by how many times more the mixed fleet does at an equal budget."""
        (single, played), (mixed, mixed_played) = self.single.samples_per_second, self.mixed.samples_per_second
        return mixed / single, mixed_played / played

    @property
    def price(self) -> Pair:
        """Return how many times the price of the mixed fleet one of one type has, at an equal throughput."""
        one, other = self.cheap_single.price_per_iteration, self.cheap_mixed.price_per_iteration
        return one[0] / other[0], one[1] / other[1]

    @property
    def line(self) -> str:
        """Return how far the benchmark is."""
        gains = [f"{predicted:.2f} (played {played:.2f})" for predicted, played in (self.throughput, self.price)]
        where = f"{self.offer} {self.model} {self.budget_per_hour:g} per hour"
        return f"{where}: throughput {gains[0]}, price {gains[1]}; {self.mixed.text}; {self.cheap_mixed.text}"


def page(cells: Sequence[Cell], offers: Offers, seeds: int, evaluations: int) -> str:
    """Return the benchmark's part of the page."""
    lines = [
        "What a mixed fleet gains over the best fleet of one GPU type, bought from the same offer and planned by the "
        f"same search (sha-ea, the best of {seeds} seeds with at most {evaluations:,} evaluations each): GRPO, "
        "asynchronous, long responses (benchmarks/fleet.yaml). Predicted by our model and, behind the stroke, played "
        "by our simulator; nothing of it was run on GPUs. Prices are in US dollars. AReaL-Hex (arXiv 2511.00796) "
        f"reports up to {PAPER_THROUGHPUT:.2f} times the throughput at an equal budget and up to {PAPER_PRICE:.2f} "
        "times less cost at an equal throughput, for models of these sizes, measured on its own fleet.",
        "",
    ]
    for name, (title, prices, topology) in offers.items():
        some = [cell for cell in cells if cell.offer == name]
        if some:
            lines += [f"**{title}.** {prices}.", "", *_offer_table(topology), "", *_throughputs(some), ""]
            lines += [*_prices(some), "", f"{_outcome(some)} {_why(topology)}", ""]
    return "\n".join(lines).rstrip()


def _offer_table(topology: Topology) -> list[str]:
    lines = [
        "| site | offered | per GPU-hour | TFLOP/s per price | GB/s of memory per price |",
        "| --- | --- | --- | --- | --- |",
    ]
    for (site, gpu, price), count in offered(topology).items():
        flops, memory = _per_price(gpu, price)
        lines.append(f"| {site} | {count} × {gpu} | {price:g} | {flops:.0f} | {memory:.0f} |")
    return lines


def _per_price(gpu: str, price: float) -> tuple[float, float]:
    """Return the catalogue's TFLOP/s and GB/s of a GPU for a price of one per hour."""
    known = gpu_type(gpu)
    return known.peak_tflops / price, known.memory_gb_per_s / price


def _throughputs(cells: Sequence[Cell]) -> list[str]:
    rows = [(one.model, f"{one.budget_per_hour:g}", one.single, one.mixed, one.throughput) for one in cells]
    return _table("budget per hour", "samples/s", lambda bought: bought.samples_per_second, rows)


def _prices(cells: Sequence[Cell]) -> list[str]:
    rows = [
        (one.model, figure(one.single.samples_per_second[0]), one.cheap_single, one.cheap_mixed, one.price)
        for one in cells
    ]
    return _table("at least, samples/s", "per iteration", lambda bought: bought.price_per_iteration, rows)


def _table(bound: str, unit: str, found: Callable[[Bought], Pair], rows: Iterable[Row]) -> list[str]:
    lines = [
        f"| model | {bound} | best of one type | {unit} | mixed | {unit} | gain |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for model, kept, single, mixed, gain in rows:
        parts = (model, kept, single.text, _pair(found(single)), mixed.text, _pair(found(mixed)), _gain(gain))
        lines.append(f"| {' | '.join(parts)} |")
    return lines


def _pair(pair: Pair) -> str:
    return " / ".join(map(figure, pair))


def _gain(pair: Pair) -> str:
    return " / ".join(f"{gain:.2f}" for gain in pair)


def _outcome(cells: Sequence[Cell]) -> str:
    """Return the range of the gains, and whether they reach the paper's."""
    said = []
    for what, gains, paper in (
        ("Throughput at an equal budget", [cell.throughput for cell in cells], PAPER_THROUGHPUT),
        ("Price at an equal throughput", [cell.price for cell in cells], PAPER_PRICE),
    ):
        parts = []
        for values, how in zip(zip(*gains, strict=True), ("predicted", "played"), strict=True):
            reached = "reached" if max(values) >= paper else "not reached"
            parts.append(f"{min(values):.2f} to {max(values):.2f} times as {how} ({reached})")
        said.append(f"{what}, the paper's {paper:.2f}: {', '.join(parts)}.")
    return " ".join(said)


def _why(topology: Topology) -> str:
    """Return what two types of the offer could gain at best, by what a price buys of each.

    One type computes most for its price, c times as much as the other, which reads memory m times as much. A sample
    costs t to train on the first and g to generate on the second: t + g on both, but t + m g on the first alone and
    c t + g on the second alone. The less of these, over t + g, is largest where they are equal, (c - 1) t = (m - 1) g,
    and is then (c m - 1) / (c + m - 2).
    """
    known = {gpu: _per_price(gpu, price) for _, gpu, price in offered(topology)}
    computes, reads = (max(known, key=lambda gpu: known[gpu][axis]) for axis in (0, 1))
    if computes == reads:
        return f"Why: {computes} gives the most of both per price, which leaves little to gain by other types."
    c, m = known[computes][0] / known[reads][0], known[reads][1] / known[computes][1]
    return (
        f"Why: per price {computes} computes most and {reads} reads memory most, {c:.2f} and {m:.2f} times as much as "
        "the other. If training waited for compute alone and generation for memory alone, and both took as long as "
        f"suits two types best, these would gain ({c:.2f} × {m:.2f} − 1) / ({c:.2f} + {m:.2f} − 2) = "
        f"{(c * m - 1) / (c + m - 2):.2f} times over one; nodes, which are bought whole, add to it or take from it."
    )
