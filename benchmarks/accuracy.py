"""How far the cost model is from the measurements that it is calibrated on: published ones, and of hetrl's own engines.

for each point: predict it with the committed efficiencies, and with a fit that has not seen it
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from _results import write_result

from hetrl.cost.efficiency import Efficiencies, calibrated
from hetrl.measure.calibrate import fit
from hetrl.measure.points import Residual, read_points, residuals

MEDIAN, WORST = 0.08, 0.25  # to reach, on the calibration set
MEDIAN_LEFT_OUT, WORST_LEFT_OUT = 0.05, 0.25  # to reach, where a point is left out of the fit


def unseen() -> list[Residual]:
    """Return each point as a fit to all others predicts it."""
    points = read_points()
    found = []
    for point in points:
        numbers: Efficiencies = fit(points, without=point)
        found += residuals([point], numbers)
    return found


def summary(pairs: Sequence[tuple[Residual, Residual]]) -> dict[str, float]:
    """Return the median and the largest absolute error of points, with all of them fitted and each left out."""
    seen, left_out = ([abs(one.error) for one in found] for found in zip(*pairs, strict=True))
    return {
        "median": statistics.median(seen),
        "worst": max(seen),
        "median_left_out": statistics.median(left_out),
        "worst_left_out": max(left_out),
    }


def _verdict(reached: bool) -> str:
    return "reached" if reached else "not reached"


def table_of(
    published: Mapping[str, float], own: Mapping[str, float], pairs: Sequence[tuple[Residual, Residual]]
) -> str:
    """Return the part of the page: the summaries of both kinds of points, then each point with its errors."""
    count = sum(one.point.own for one, _ in pairs)
    median, worst, median_unseen, worst_unseen = published.values()
    verdict = _verdict(median <= MEDIAN and worst <= WORST)
    unseen_verdict = _verdict(median_unseen <= MEDIAN_LEFT_OUT and worst_unseen <= WORST_LEFT_OUT)
    lines = [
        f"`hetrl predict` against {len(pairs) - count} published measurements, the ones it is calibrated on: "
        f"median error {median:.1%}, worst {worst:.1%} (to reach: {MEDIAN:.0%} and {WORST:.0%}; {verdict}). The "
        f"last column predicts each point by a fit to the others: median {median_unseen:.1%}, worst "
        f"{worst_unseen:.1%} (to reach: {MEDIAN_LEFT_OUT:.0%} and {WORST_LEFT_OUT:.0%}; {unseen_verdict}). Beside "
        f"them {count} measurements of hetrl's own engines on one GPU: median {own['median']:.1%}, worst "
        f"{own['worst']:.1%}; left out {own['median_left_out']:.1%} and {own['worst_left_out']:.1%}, since some "
        "numbers rest on one of them. Units: tokens/s for generation, tokens/s per GPU or seconds per step for "
        "training, milliseconds for layers.",
        "",
        "| point | source | measured | predicted | error | error when left out |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| {one.point.name} | {one.point.source} | {one.point.value:g} | {one.predicted:.4g} | {one.error:+.1%} "
        f"| {other.error:+.1%} |"
        for one, other in pairs
    ]
    return "\n".join(lines)


def record(one: Residual, left_out: Residual) -> dict[str, object]:
    """Return what the result keeps of a point."""
    return {
        "point": one.point.name,
        "unit": one.point.measure,
        "measured": one.point.value,
        "predicted": one.predicted,
        "error": one.error,
        "error_left_out": left_out.error,
        "source": one.point.source,
    }


def main() -> None:
    """Predict all points, write the result."""
    pairs = list(zip(residuals(read_points(), calibrated()), unseen(), strict=True))
    own, published = (summary([pair for pair in pairs if pair[0].point.own == ours]) for ours in (True, False))
    table = table_of(published, own, pairs)
    write_result(
        "accuracy", {"seed": None, "own": own, **published, "points": [record(*pair) for pair in pairs]}, table
    )
    print(table)


if __name__ == "__main__":
    main()
