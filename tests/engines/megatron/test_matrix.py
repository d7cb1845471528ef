"""The same batch gives the same loss, gradients and weights, however the work is cut."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest

from tests.engines.megatron.megatron_worlds import (
    LAYERS,
    LAYOUTS,
    Job,
    Layout,
    Outcome,
    Worlds,
    assert_same,
    model_config,
    step_job,
    weights,
)

MODELS = {
    "qwen3": model_config("qwen3"),
    "qwen3-tied": model_config("qwen3", tie_word_embeddings=True),
    "llama": model_config("llama", rms_norm_eps=1e-5),
    "llama-tied": model_config("llama", tie_word_embeddings=True),
}
PLAIN = {"distributed": False}
RECOMPUTED = {
    "recomputed": {"recompute": "full"},
    "one layer recomputed": {"recompute": "full", "recompute_layers": 1},
    "no layer recomputed": {"recompute": "full", "recompute_layers": 0},
    "selectively recomputed": {"recompute": "selective"},
}
BUCKETS = {"bucket_parameters": 5000}  # several in a layer
RECOMPUTING = ("one", "pipeline", "tensor-data", "tensor-pipeline")
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"{layout}, plain optimiser": (layout, PLAIN) for layout in ("one", "data", "tensor-pipeline")},
    **{
        f"{layout}, {how}": (layout, changes)
        for layout, (how, changes) in product(RECOMPUTING, RECOMPUTED.items())
        if layout == "one" or how != "no layer recomputed"
    },
    "data-pipeline, plain optimiser": ("data-pipeline", PLAIN),
    **{f"{layout}, buckets": (layout, BUCKETS) for layout in ("data", "data-pipeline", "tensor-data")},
}
LLAMA_CASES = ("three-stages", "tensor-pipeline", "data-pipeline")


def assert_same_steps(worlds: Worlds, reference: Outcome, job: Job) -> None:
    outcome = worlds.outcome(job)
    assert outcome.agreed
    for ours, expected in zip(outcome.metrics, reference.metrics, strict=True):
        assert ours == pytest.approx(expected, rel=2e-5)
    given = dict(weights(job.config))
    assert_same(outcome.loaded, given, 0.0)
    assert_same(outcome.gradients, reference.gradients, 1e-6)
    assert_same(outcome.exported, reference.exported, 1e-5)
    assert all(tensor.is_contiguous() for tensor in outcome.exported.values())


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout != "one"])
@pytest.mark.parametrize("model", ["qwen3", "qwen3-tied"])
def test_a_step_does_not_depend_on_the_layout(
    worlds: Worlds, alone: Callable[..., Outcome], model: str, layout: str
) -> None:
    config = MODELS[model]
    assert_same_steps(worlds, alone(config), step_job(config, LAYOUTS[layout]))


@pytest.mark.parametrize("layout", LLAMA_CASES)
@pytest.mark.parametrize("model", ["llama", "llama-tied"])
def test_a_step_of_llama_does_not_depend_on_the_layout(
    worlds: Worlds, alone: Callable[..., Outcome], model: str, layout: str
) -> None:
    config = MODELS[model]
    assert_same_steps(worlds, alone(config), step_job(config, LAYOUTS[layout]))


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_step_does_not_depend_on_how_it_is_computed(
    worlds: Worlds, alone: Callable[..., Outcome], variant: str
) -> None:
    config, (layout, changes) = MODELS["qwen3-tied"], VARIANTS[variant]
    assert_same_steps(worlds, alone(config), step_job(config, LAYOUTS[layout], **changes))


def test_the_gradients_of_the_matrix_are_not_zero(alone: Callable[..., Outcome]) -> None:
    outcome = alone(MODELS["qwen3"])
    assert all(float(gradient.abs().max()) > 1e-4 for gradient in outcome.gradients.values())
    norm = sum(float((gradient**2).sum()) for gradient in outcome.gradients.values()) ** 0.5
    assert norm == pytest.approx(min(0.5, outcome.metrics[0]["grad_norm"]), rel=1e-4)


@pytest.mark.parametrize("micro_batch", [1, 4])
def test_micro_batches_of_any_number_of_sequences_agree(
    worlds: Worlds, alone: Callable[..., Outcome], micro_batch: int
) -> None:
    config = MODELS["qwen3"]
    assert_same_steps(worlds, alone(config), step_job(config, Layout(1, LAYERS, (8,), micro_batch)))
