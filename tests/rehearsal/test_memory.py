"""What a rank holds on its device is what the cost model says; logits that are made whole are found."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from hetrl.cost.compute import StageShape
from hetrl.cost.efficiency import calibrated
from hetrl.cost.memory import inference_footprint
from hetrl.lengths import Lengths
from hetrl.plan.plan import TaskPlan
from hetrl.runtime.megatron.layout import Layout
from hetrl.workload import Workload, architecture
from lab.fake_cuda.engine_rank import EngineRank, play
from lab.fake_cuda.ranks import Stage

MODEL = architecture("qwen3-1.7b")
RANK = EngineRank("qwen3-1.7b", Layout(1, ((0, MODEL.layers),), (4,), 2), 0, 2048, training=False)


def predicted_bytes() -> float:
    workload = Workload("grpo", "sync", 0, 4, 1, 1, Lengths(RANK.tokens - 1.0, RANK.tokens - 1), 1, actor=MODEL)
    shape = StageShape(MODEL, MODEL.layers, True, True, True, 1, calibrated().rates("h100"))
    return inference_footprint(shape, TaskPlan("megatron", (), micro_batch=2), workload).total_gb * 1e9


def whole_logits(case: EngineRank) -> Any:
    """Score with all logits of a micro-batch at once."""
    from hetrl.runtime.megatron import outputs

    sound = outputs.token_logprobs
    outputs.token_logprobs = partial(sound, chunk_bytes=2**50)
    try:
        return play(case)
    finally:
        outputs.token_logprobs = sound


def test_a_rank_holds_what_is_predicted(stage: Stage) -> None:
    assert stage.play(play, RANK).peak_bytes == pytest.approx(predicted_bytes(), rel=0.05)


def test_whole_logits_are_found(stage: Stage) -> None:
    assert stage.play(whole_logits, RANK).peak_bytes > 1.5 * predicted_bytes()
