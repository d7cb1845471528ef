"""When a play has shown enough: by how well its mean is known, and whether anything still builds up."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from itertools import accumulate

import pytest

from hetrl.simulator.steady import MOST_ITERATIONS, PRECISION, Versions, half_width


def played(
    seconds: Callable[[int], float],
    window: int = 2,
    busy: Callable[[int], float] = lambda _: 1.0,
    late: Callable[[int], int] = lambda _: 0,
    builds_up: bool = True,
) -> Versions:
    """Serve versions whose iteration i takes so long, until they are steady or there are too many."""
    versions = Versions(window, [0.0], [[0.0, 0.0]], [0])
    while versions.done < MOST_ITERATIONS and not versions.is_steady(builds_up):
        number = versions.done
        versions.times.append(versions.times[-1] + seconds(number))
        versions.busy.append([one + busy(number) for one in versions.busy[-1]])
        versions.late.append(late(number))
    return versions


def test_iterations_that_are_all_alike_are_few() -> None:
    assert played(lambda _: 3.0, window=1).done == 6
    assert played(lambda _: 3.0, window=3).done == 18


def test_the_start_does_not_count() -> None:
    versions = played(lambda number: 50.0 if number < 2 else 2.0)
    assert versions.iteration_seconds == 2.0


def test_bursts_of_versions_are_alike() -> None:
    versions = played(lambda number: (0.5, 0.5, 8.0)[number % 3], window=3)
    assert versions.done == 18
    assert versions.iteration_seconds == 3.0


CYCLE = (36.2, 26.0, 26.0, 26.5, 18.4, 28.0, 28.1)  # of a plan of mode async whose responses have one length


def test_iterations_that_repeat_count_in_whole_cycles() -> None:
    versions = played(lambda number: 46.2 if number < 2 else CYCLE[number % 7])
    assert versions.done == 2 + 3 * 7
    assert versions.iteration_seconds == pytest.approx(sum(CYCLE) / 7)


def test_a_cycle_that_ends_no_more() -> None:
    """What repeated once but does not go on is no cycle: only the last iterations tell."""
    versions = Versions(2, [0.0], [[0.0]], [0])
    for seconds in (*CYCLE * 3, 40.0):
        versions.times.append(versions.times[-1] + seconds)
    assert versions.cycle == 0
    assert versions.counted == 10  # whole windows of 2, of 22 iterations


def test_a_cycle_in_which_generation_runs_down_is_not_steady() -> None:
    assert played(lambda number: CYCLE[number % 7], busy=lambda number: 0.9**number).done == MOST_ITERATIONS


@pytest.mark.parametrize("deviation", [0.05, 0.1])
def test_unequal_iterations_go_on_until_their_mean_is_known(deviation: float) -> None:
    rng = random.Random(1)
    means = [
        played(lambda _: rng.gauss(10.0, 10 * deviation), window=1, builds_up=False).iteration_seconds
        for _ in range(200)
    ]
    off = [abs(mean / 10 - 1) for mean in means]
    assert statistics.quantiles(off, n=5)[-1] < PRECISION


def test_a_generation_that_lives_on_what_the_start_left_over_is_not_steady() -> None:
    runs_down = played(lambda _: 3.0, busy=lambda number: 0.9**number)
    assert runs_down.done == MOST_ITERATIONS
    assert played(lambda _: 3.0, busy=lambda number: 0.9**number, builds_up=False).done < MOST_ITERATIONS


def test_a_critic_that_falls_further_behind_is_not_steady() -> None:
    assert played(lambda _: 3.0, late=lambda number: number // 3).done == MOST_ITERATIONS
    assert played(lambda _: 3.0, late=lambda number: min(number, 4)).done < 20


def test_the_busiest_replica_counts() -> None:
    versions = Versions(1, [0.0, 1.0, 2.0, 4.0, 6.0], [[2 * n, 3 * n] for n in range(5)], [0] * 5)
    assert versions.counted == 2
    assert versions.busiest_seconds == 3
    assert versions.iteration_seconds == 2


def test_the_interval_is_that_of_students_table() -> None:
    for count, student in ((6, 2.571), (11, 2.228), (31, 2.042)):
        values = list(accumulate([1.0] * count))
        expected = student * statistics.stdev(values) / count**0.5
        assert half_width(values) == pytest.approx(expected, rel=0.01)
