"""The same batch gives the same loss, gradients and weights, however the work is cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
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
    token_batch,
    weights,
)

MODELS = {
    "qwen3": model_config("qwen3"),
    "qwen3-tied": model_config("qwen3", tie_word_embeddings=True),
    "llama": model_config("llama", rms_norm_eps=1e-5),
    "llama-tied": model_config("llama", tie_word_embeddings=True),
}
PLAIN, PACKED, RECOMPUTED = {"distributed": False}, {"packed": True}, {"recompute": "full"}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"{layout}, plain optimiser": (layout, PLAIN) for layout in ("one", "data", "tensor-pipeline")},
    **{f"{layout}, packed": (layout, PACKED) for layout in LAYOUTS if layout not in ("tensor", "pipeline")},
    **{f"{layout}, recomputed": (layout, RECOMPUTED) for layout in ("one", "pipeline", "tensor-data")},
    "tensor-pipeline, packed, recomputed": ("tensor-pipeline", PACKED | RECOMPUTED),
    "data-pipeline, packed, plain optimiser": ("data-pipeline", PACKED | PLAIN),
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
    assert_same_steps(worlds, alone(config), step_job(config, LAYOUTS[layout], packed=layout == "data-pipeline"))


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


@pytest.mark.parametrize("layout", ["one", "data-pipeline", "tensor-pipeline"])
@pytest.mark.parametrize("samples", [1, 5])
def test_packed_scores_are_the_padded_ones(worlds: Worlds, layout: str, samples: int) -> None:
    config, batch = model_config(), token_batch(samples=samples)
    padded = worlds.outcome(Job(config, LAYOUTS["one"], batch, temperature=0.8)).scores
    packed = worlds.outcome(Job(config, LAYOUTS[layout], batch, temperature=0.8, packed=True)).scores
    numpy.testing.assert_allclose(packed, padded, atol=1e-5)
    assert (packed[:, 0] == 0).all()
    assert (packed[~batch.real] == 0).all()


@pytest.mark.parametrize("micro_batch", [1, 4])
def test_packed_micro_batches_of_any_number_of_sequences_agree(
    worlds: Worlds, alone: Callable[..., Outcome], micro_batch: int
) -> None:
    config = MODELS["qwen3"]
    assert_same_steps(worlds, alone(config), step_job(config, Layout(1, LAYERS, (8,), micro_batch), packed=True))
