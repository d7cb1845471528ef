"""The formula of a pipeline against the schedule that it stands for, played pass by pass, hop by hop."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, strategies as st

from hetrl.cost.training import Times, pipeline_seconds
from hetrl.hardware import Path
from hetrl.simulator.pipelines import BACKWARD, FORWARD, one_forward_one_backward


def played(stages: list[Times], micro_batches: int) -> float:
    """Return when the last pass ends, each as early as what it needs allows; a wire carries one at a time."""
    count = len(stages)
    orders = [list(one_forward_one_backward(count, stage, micro_batches)) for stage in range(count)]
    arrived = {(FORWARD, 0, j): 0.0 for j in range(micro_batches)}
    free, wires, places = [0.0] * count, {kind: [0.0] * count for kind in (FORWARD, BACKWARD)}, [0] * count
    while any(place < len(order) for place, order in zip(places, orders, strict=True)):
        for i, order in enumerate(orders):
            while places[i] < len(order):
                kind, j = order[places[i]]
                if (kind, i, j) not in arrived:
                    break
                seconds = stages[i].forward if kind == FORWARD else stages[i].backward
                free[i] = max(free[i], arrived[kind, i, j]) + seconds
                places[i] += 1
                following, hop = (i + 1, i) if kind == FORWARD else (i - 1, i - 1)
                if following == count:
                    arrived[BACKWARD, i, j] = free[i]
                elif following >= 0:
                    wires[kind][hop] = max(wires[kind][hop], free[i]) + stages[hop].hop_transfer
                    delay = stages[hop].hop_seconds - stages[hop].hop_transfer
                    arrived[kind, following, j] = wires[kind][hop] + delay
    return max(free)


@st.composite
def pipelines(draw: st.DrawFn) -> list[Times]:
    """Stages of unequal speed, backward passes two or three times as long, some of the hops with delay or slow."""
    times = draw(st.floats(2, 3))
    forwards = draw(st.lists(st.floats(0.3, 1.5), min_size=1, max_size=8))
    hops = [Path(draw(st.sampled_from([0.0, 300.0, 2000.0])), 8.0) for _ in forwards[1:]]
    sent = [draw(st.sampled_from([0.0, 0.0, 0.5, 3.0, 20.0])) for _ in hops]  # seconds on the wire
    pairs = zip(forwards, [*hops, None], [*sent, 0.0], strict=True)
    return [Times(one, times * one, hop, 1e9 * seconds) for one, hop, seconds in pairs]


@given(pipelines(), st.integers(1, 64))
def test_a_pipeline_takes_about_what_its_schedule_takes(stages: list[Times], micro_batches: int) -> None:
    exact = played(stages, micro_batches)
    assert 0.85 * exact <= pipeline_seconds(stages, micro_batches) <= 1.2 * exact


@given(pipelines(), st.integers(1, 64), st.integers(0, 7), st.floats(1, 3))
def test_a_slower_stage_or_one_micro_batch_more_never_takes_less(
    stages: list[Times], micro_batches: int, place: int, factor: float
) -> None:
    before = pipeline_seconds(stages, micro_batches)
    slower = [*stages]
    one = stages[place % len(stages)]
    slower[place % len(stages)] = replace(one, forward=one.forward * factor, backward=one.backward * factor)
    assert pipeline_seconds(slower, micro_batches) >= before * (1 - 1e-9)
    assert pipeline_seconds(stages, micro_batches + 1) >= before * (1 - 1e-9)
