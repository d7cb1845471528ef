"""The formula of a pipeline against the schedule that it stands for, played pass by pass."""

from __future__ import annotations

from hypothesis import given, strategies as st

from hetrl.cost.training import Times, pipeline_seconds
from hetrl.hardware import Path
from hetrl.simulator.pipelines import FORWARD, one_forward_one_backward


def played(stages: list[Times], micro_batches: int) -> float:
    """Return when the last pass ends, each as early as its stage and what it needs allow."""
    count = len(stages)
    orders = [list(one_forward_one_backward(count, stage, micro_batches)) for stage in range(count)]
    ended: dict[tuple[str, int, int], float] = {}
    free, places = [0.0] * count, [0] * count
    while any(place < len(order) for place, order in zip(places, orders, strict=True)):
        for i, order in enumerate(orders):
            while places[i] < len(order):
                kind, j = order[places[i]]
                ready = _ready(stages, ended, kind, i, j)
                if ready is None:
                    break
                free[i] = max(free[i], ready) + (stages[i].forward if kind == FORWARD else stages[i].backward)
                ended[kind, i, j] = free[i]
                places[i] += 1
    return max(free)


def _ready(stages: list[Times], ended: dict[tuple[str, int, int], float], kind: str, i: int, j: int) -> float | None:
    if kind == FORWARD:
        before, hop = (FORWARD, i - 1, j), stages[i - 1].hop_seconds
        return 0.0 if i == 0 else ended[before] + hop if before in ended else None
    if i == len(stages) - 1:
        return ended.get((FORWARD, i, j))
    after = (kind, i + 1, j)
    return ended[after] + stages[i].hop_seconds if after in ended else None


@st.composite
def pipelines(draw: st.DrawFn) -> list[Times]:
    """Stages of unequal speed, backward passes two or three times as long, hops with a delay between some of them."""
    times = draw(st.floats(2, 3))
    forwards = draw(st.lists(st.floats(0.3, 1.5), min_size=1, max_size=8))
    delays = [draw(st.sampled_from([0.0, 300.0, 2000.0])) for _ in forwards[1:]]
    hops = [*(Path(delay_ms, 1e9) for delay_ms in delays), None]
    return [Times(one, times * one, hop) for one, hop in zip(forwards, hops, strict=True)]


@given(pipelines(), st.integers(1, 64))
def test_a_pipeline_takes_about_what_its_schedule_takes(stages: list[Times], micro_batches: int) -> None:
    exact = played(stages, micro_batches)
    assert 0.85 * exact <= pipeline_seconds(stages, micro_batches) <= 1.2 * exact


@given(pipelines(), st.integers(1, 64), st.integers(0, 7), st.floats(1, 3), st.floats(0, 0.5))
def test_a_slower_stage_or_one_micro_batch_more_never_takes_less(
    stages: list[Times], micro_batches: int, place: int, factor: float, variation: float
) -> None:
    before = pipeline_seconds(stages, micro_batches, variation)
    slower = [*stages]
    one = stages[place % len(stages)]
    slower[place % len(stages)] = Times(one.forward * factor, one.backward * factor, one.hop)
    assert pipeline_seconds(slower, micro_batches, variation) >= before * (1 - 1e-9)
    assert pipeline_seconds(stages, micro_batches + 1, variation) >= before * (1 - 1e-9)
