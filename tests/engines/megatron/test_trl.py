"""A step of our engine is the step of TRL's GRPOTrainer: advantages, log-probs, loss, gradients, on several layouts."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy
import pytest
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.torch import load_file

from hetrl.runtime.megatron.batch import TokenBatch
from hetrl.runtime.megatron.optimizer import OptimizerSettings
from hetrl.runtime.rl.experience import experience, loss_settings, minibatches, policy_batch, valued_batch
from tests.engines.megatron.megatron_worlds import (
    LAYOUTS,
    Job,
    Worlds,
    first_gradients,
    start_engine,
    token_batch,
    weights,
)
from tests.engines.megatron.trl_cases import (
    CASES,
    MODELS,
    PAD_TOKEN,
    PROMPTS,
    REFERENCE,
    RESPONSES,
    groups,
    reference_logprobs,
)

LOCK = Path(__file__).parents[3] / "requirements" / "trl.lock"
# The other layouts take the same step as these (test_matrix.py).
HELD = (
    ("qwen3", "one"),
    ("qwen3", "data"),
    ("qwen3", "tensor-pipeline"),
    ("llama", "one"),
    ("llama", "tensor-pipeline"),
)
# Adam's first moments are then the gradients of the last step, whole, and no step changes the weights.
STILL = OptimizerSettings(learning_rate=0.0, beta1=0.0, clip_grad=0.0)

Seen = tuple[NDArray[numpy.float32], dict[str, float], dict[str, torch.Tensor]]


@cache
def reference() -> dict[str, torch.Tensor]:
    """Return the whole file."""
    return load_file(REFERENCE)


def of_trl(model: str, case: str, kind: str = "") -> dict[str, torch.Tensor]:
    """Return what the file has of a step, or what it has of it below a `kind`."""
    head = f"{model}/{case}/{kind}"
    return {name.removeprefix(head): tensor for name, tensor in reference().items() if name.startswith(head)}


def batch(case: str) -> TokenBatch:
    """Return the minibatch that our learner makes of the groups."""
    algorithm = CASES[case].algorithm
    arrays = experience(groups(), PAD_TOKEN)
    if algorithm.kl_coefficient:
        arrays["reference_logprobs"] = numpy.zeros(arrays["mask"].shape, numpy.float32)
        arrays["reference_logprobs"][arrays["mask"]] = reference_logprobs()
    valued, _ = valued_batch(arrays, groups(), algorithm)
    trained, _ = policy_batch(valued, groups(), 0, algorithm)
    (part,) = minibatches(trained, 1, algorithm)
    return TokenBatch(part.pop("tokens"), part.pop("lengths"), part.pop("mask"), part)


def steps(rank: int, port: int, job: Job) -> dict[str, Seen]:
    """Return what rank 0 sees of each case: scores, metrics, gradients."""
    engine, seen = start_engine(rank, port, job), {}
    engine.load(weights(job.config))
    for name, case in CASES.items():
        given, settings = batch(name), loss_settings(case.algorithm)
        scores = engine.score(given, settings.temperature)
        metrics = engine.train_step(given, msgspec.structs.replace(settings, learning_rate=0.0))
        seen[name] = (scores, metrics, first_gradients(engine, rank))
    engine.close()
    return seen


@pytest.fixture(scope="module")
def ours(worlds: Worlds) -> Any:
    """Give a function that returns what all cases come to for a model on a layout, computed once."""

    @cache
    def seen(model: str, layout: str) -> dict[str, Seen]:
        job = Job(MODELS[model], LAYOUTS[layout], token_batch(), optimizer=STILL)
        result: dict[str, Seen] = worlds.run(steps, job.layout.world_size, job)[0]
        return result

    return seen


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("model", "layout"), HELD)
def test_a_step_is_that_of_trl(ours: Any, model: str, layout: str, case: str) -> None:
    scores, metrics, gradients = ours(model, layout)[case]
    mask, close = batch(case).mask, numpy.testing.assert_allclose
    close(scores[mask], of_trl(model, case)["logprobs"].numpy(), rtol=0, atol=1e-5)
    for name, value in of_trl(model, case, "metric/").items():
        assert metrics[name] == pytest.approx(float(value), rel=1e-5, abs=1e-6), name
    theirs = of_trl(model, case, "gradient/")
    assert gradients.keys() == theirs.keys()
    for name, gradient in gradients.items():
        close(gradient.numpy(), theirs[name].numpy(), rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("case", CASES)
def test_advantages_are_those_of_trl(case: str) -> None:
    starts = numpy.repeat(PROMPTS, len(RESPONSES[0]))
    advantages = batch(case).extras["advantages"][numpy.arange(len(starts)), starts]
    for model in MODELS:
        theirs = of_trl(model, case)["advantages"].numpy()
        numpy.testing.assert_allclose(advantages, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("model", MODELS)
def test_what_trl_gave_shows_every_term(model: str, case: str) -> None:
    metrics, fresh = of_trl(model, case, "metric/"), CASES[case].fresh
    assert fresh or 0.1 < float(metrics["clip_fraction"]) < 0.9
    assert "kl" not in metrics or float(metrics["kl"]) > 0.1
    for name, gradient in of_trl(model, case, "gradient/").items():
        assert float(gradient.abs().max()) > 1e-3, name


def test_the_batch_reaches_the_other_bounds_too(ours: Any) -> None:
    metrics = {case: seen[1] for case, seen in ours("qwen3", "one").items()}
    assert metrics["token-mean, tempered"]["dual_clip_fraction"] > 0
    assert all(0 < metrics[f"first step, {bound}"]["importance_cut"] < 1 for bound in ("truncated", "masked"))


def test_the_file_is_of_the_frozen_version() -> None:
    with safe_open(REFERENCE, "pt") as file:
        version = file.metadata()["trl"]
    assert f"trl=={version}" in LOCK.read_text().splitlines()
