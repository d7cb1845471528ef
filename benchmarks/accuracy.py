"""How far the cost model is from the measurements that it is calibrated on: published ones, and of hetrl's own engines.

for each point: predict it with the committed efficiencies, and with a fit that has not seen it
"""

from __future__ import annotations

import statistics

from _results import write_result

from hetrl.cost.efficiency import Efficiencies, calibrated
from hetrl.measure.calibrate import Residual, fit, read_points, residuals

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


def summary(found: list[Residual]) -> tuple[float, float]:
    """Return the median and the largest absolute error."""
    errors = [abs(one.error) for one in found]
    return statistics.median(errors), max(errors)


def _verdict(reached: bool) -> str:
    return "reached" if reached else "not reached"


def main() -> None:
    """Predict all points, write the result."""
    seen = residuals(read_points(), calibrated())
    left_out = unseen()
    published = [summary([one for one in found if not one.point.own]) for found in (seen, left_out)]
    own, own_unseen = (summary([one for one in found if one.point.own]) for found in (seen, left_out))
    (median, worst), (median_unseen, worst_unseen) = published
    count = sum(one.point.own for one in seen)
    verdict = _verdict(median <= MEDIAN and worst <= WORST)
    unseen_verdict = _verdict(median_unseen <= MEDIAN_LEFT_OUT and worst_unseen <= WORST_LEFT_OUT)
    rows = [
        f"| {one.point.name} | {one.point.source} | {one.point.value:g} | {one.predicted:.4g} | {one.error:+.1%} "
        f"| {other.error:+.1%} |"
        for one, other in zip(seen, left_out, strict=True)
    ]
    table = "\n".join(
        [
            f"`hetrl predict` against {len(seen) - count} published measurements, the ones it is calibrated on: "
            f"median error {median:.1%}, worst {worst:.1%} (to reach: {MEDIAN:.0%} and {WORST:.0%}; {verdict}). The "
            f"last column predicts each point by a fit to the others: median {median_unseen:.1%}, worst "
            f"{worst_unseen:.1%} (to reach: {MEDIAN_LEFT_OUT:.0%} and {WORST_LEFT_OUT:.0%}; {unseen_verdict}). Beside "
            f"them {count} measurements of hetrl's own engines on one GPU: median {own[0]:.1%}, worst {own[1]:.1%}; "
            f"left out {own_unseen[0]:.1%} and {own_unseen[1]:.1%}, since some numbers rest on one of them. Units: "
            "tokens/s for generation, tokens/s per GPU or seconds per step for training, milliseconds for layers.",
            "",
            "| point | source | measured | predicted | error | error when left out |",
            "| --- | --- | --- | --- | --- | --- |",
            *rows,
        ]
    )
    points = [
        {
            "point": one.point.name,
            "unit": one.point.measure,
            "measured": one.point.value,
            "predicted": one.predicted,
            "error": one.error,
            "error_left_out": other.error,
            "source": one.point.source,
        }
        for one, other in zip(seen, left_out, strict=True)
    ]
    result = {
        "seed": None,
        "own": {"median": own[0], "worst": own[1], "median_left_out": own_unseen[0], "worst_left_out": own_unseen[1]},
        "median": median,
        "worst": worst,
        "median_left_out": median_unseen,
        "worst_left_out": worst_unseen,
        "points": points,
    }
    write_result("accuracy", result, table)
    print(table)


if __name__ == "__main__":
    main()
