from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy
import pytest
import torch

from hetrl.errors import HetrlError
from hetrl.runtime.megatron.batch import TokenBatch
from hetrl.runtime.megatron.layout import Layout
from hetrl.runtime.wire import LossSettings
from tests.engines.megatron.megatron_worlds import (
    ADAM,
    LAYERS,
    LAYOUTS,
    Job,
    Outcome,
    Worlds,
    assert_same,
    model_config,
    start_engine,
    step_job,
    store_at,
    token_batch,
    weights,
)

MODELS = {
    "qwen3": model_config("qwen3"),
    "qwen3-tied": model_config("qwen3", tie_word_embeddings=True),
    "qwen2": model_config("qwen2"),
    "llama": model_config("llama", rms_norm_eps=1e-5),
    "llama3-rope": model_config(
        "llama",
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ),
}


def transformer(config: dict[str, Any]) -> Any:
    """Return the model of transformers with the same weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), attn_implementation="eager")
    model.load_state_dict(dict(weights(config)), strict=not config["tie_word_embeddings"])
    return model.float().eval()


def transformer_logprobs(model: Any, batch: TokenBatch, temperature: float = 1.0) -> torch.Tensor:
    """Return [n, s]: log-probs of the real tokens with a prefix, else 0; one sequence at a time, without padding."""
    rows = []
    for tokens, length in zip(batch.tokens, batch.lengths, strict=True):
        sequence = torch.from_numpy(tokens[:length])
        logits = model(sequence[None]).logits[0] / temperature
        chosen = logits.log_softmax(-1)[:-1].gather(-1, sequence[1:, None])[:, 0]
        rows.append(torch.nn.functional.pad(chosen, (1, batch.tokens.shape[1] - int(length))))
    return torch.stack(rows)


@pytest.mark.parametrize("model", MODELS)
def test_scores_agree_with_transformers(worlds: Worlds, model: str) -> None:
    config, batch = MODELS[model], token_batch()
    outcome = worlds.outcome(Job(config, LAYOUTS["one"], batch))
    with torch.no_grad():
        expected = transformer_logprobs(transformer(config), batch)
    assert outcome.scores.dtype == numpy.float32
    numpy.testing.assert_allclose(outcome.scores, expected.numpy(), atol=1e-5)
    assert (outcome.scores[:, 0] == 0).all()
    assert (outcome.scores[~batch.real] == 0).all()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("samples", [1, 5])
def test_scores_do_not_depend_on_the_layout(worlds: Worlds, layout: str, samples: int) -> None:
    config, batch = model_config(), token_batch(samples=samples)
    outcome = worlds.outcome(Job(config, LAYOUTS[layout], batch, temperature=0.8))
    with torch.no_grad():
        expected = transformer_logprobs(transformer(config), batch, temperature=0.8)
    numpy.testing.assert_allclose(outcome.scores, expected.numpy(), atol=1e-5)


def test_a_vocabulary_that_tensor_parallelism_does_not_divide_is_padded(worlds: Worlds) -> None:
    config, batch = model_config(vocab_size=127), token_batch(vocabulary=127)
    one, two = (
        worlds.outcome(Job(config, LAYOUTS[layout], batch, steps=2, optimizer=ADAM)) for layout in ("one", "tensor")
    )
    numpy.testing.assert_allclose(one.scores, two.scores, atol=1e-5)
    assert_same(one.exported, two.exported, 1e-5)


@pytest.mark.parametrize("tied", [False, True])
def test_a_step_agrees_with_transformers_and_torch(alone: Callable[..., Outcome], tied: bool) -> None:
    config = model_config(tie_word_embeddings=tied)
    outcome, batch, model = alone(config), token_batch(), transformer(config)
    decaying = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    plain = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    groups = [{"params": decaying, "weight_decay": ADAM.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=ADAM.learning_rate, betas=(ADAM.beta1, ADAM.beta2), eps=ADAM.eps)
    mask = torch.from_numpy(batch.mask)
    old, reference, advantages = (
        torch.from_numpy(batch.extras[name])[mask] for name in ("old_logprobs", "reference_logprobs", "advantages")
    )
    for metrics in outcome.metrics:
        logprobs = transformer_logprobs(model, batch)[mask]
        ratio, distance = (logprobs - old).exp(), reference - logprobs
        surrogate = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.3) * advantages)
        loss = (-surrogate + 0.1 * (distance.exp() - distance - 1.0)).mean()
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), ADAM.clip_grad)
        optimizer.step()
        assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-5)
        assert metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-5)
        assert metrics["ratio"] == pytest.approx(ratio.mean().item(), rel=1e-5)
        assert metrics["tokens"] == int(mask.sum())
    theirs = dict(model.state_dict())
    assert_same(outcome.exported, {name: theirs[name] for name in outcome.exported}, 2e-5)


@pytest.mark.parametrize("layout", ["one", "data-pipeline"])
def test_the_same_inputs_give_the_same_bits(worlds: Worlds, layout: str) -> None:
    first, again = (worlds.outcome(step_job(model_config(), LAYOUTS[layout])) for _ in range(2))
    assert first.metrics == again.metrics
    assert_same(first.exported, again.exported, 0.0)


def test_bfloat16_weights_train_with_float32_main_parameters(worlds: Worlds) -> None:
    settings = replace(ADAM, learning_rate=1e-4)
    loss, layout = LossSettings(loss="supervised"), LAYOUTS["tensor-data"]
    job = Job(model_config(), layout, token_batch(), loss, 4, settings, dtype="bfloat16")
    outcome = worlds.outcome(job)
    given = dict(weights(job.config))
    assert all(torch.equal(outcome.loaded[name], given[name].bfloat16()) for name in given)
    assert {tensor.dtype for tensor in outcome.exported.values()} == {torch.bfloat16}
    losses = [metrics["loss"] for metrics in outcome.metrics]
    assert losses == sorted(losses, reverse=True)
    assert len(set(losses)) == 4


def refusals(rank: int, port: int, job: Job) -> dict[str, str]:
    """Provoke each error of a running engine and return the messages."""
    engine, messages = start_engine(rank, port, job), {}
    good = dict(weights(job.config))
    name = "model.layers.2.mlp.up_proj.weight"
    calls = {
        "no weights": lambda: engine.score(job.batch),
        "missing": lambda: engine.load((n, t) for n, t in good.items() if n != name),
        "surplus": lambda: engine.load([*good.items(), ("model.layers.4.mlp.up_proj.weight", good[name])]),
        "shape": lambda: engine.load((n, t[:1] if n == name else t) for n, t in good.items()),
        "still no weights": lambda: list(engine.export()),
    }
    for what, call in calls.items():
        messages[what] = message_of(call)
    engine.load(good.items())
    calls = {
        "no target": lambda: engine.train_step(replace(job.batch, mask=job.batch.mask & False), LossSettings()),
        "unknown loss": lambda: engine.train_step(job.batch, LossSettings(loss="plicy")),
        "not finite": lambda: engine.train_step(poisoned(job.batch), LossSettings()),
    }
    for what, call in calls.items():
        messages[what] = message_of(call)
    kept = dict(engine.export())
    messages["weights kept"] = str(all(torch.equal(kept[name], good[name]) for name in kept))
    still = engine.train_step(job.batch, LossSettings(learning_rate=0.0))
    kept = dict(engine.export())
    messages["learning rate"] = str((still["learning_rate"], all(torch.equal(kept[n], good[n]) for n in kept)))
    return messages


def message_of(call: Any) -> str:
    try:
        call()
    except HetrlError as error:
        return str(error)
    return "no error"


def poisoned(batch: TokenBatch) -> TokenBatch:
    advantages = batch.extras["advantages"].copy()
    advantages[batch.mask] = numpy.inf
    return replace(batch, extras={**batch.extras, "advantages": advantages})


def test_a_wrong_call_is_refused_on_every_rank_and_leaves_the_weights(worlds: Worlds) -> None:
    job = Job(model_config(), LAYOUTS["pipeline"], token_batch(), optimizer=replace(ADAM, weight_decay=0.0))
    for messages in worlds.run(refusals, 2, job):
        expected = {
            "no weights": "call load first",
            "missing": "1 tensors are missing: model.layers.2.mlp.up_proj.weight",
            "surplus": "1 tensors are unknown to this model: model.layers.4.mlp.up_proj.weight",
            "shape": "model.layers.2.mlp.up_proj.weight has shape (1, 64), config.json says (96, 64)",
            "still no weights": "call load first",
            "no target": "its mask is empty",
            "unknown loss": 'unknown loss "plicy"',
            "not finite": "the step was not taken",
            "weights kept": "True",
            "learning rate": "(0.0, True)",
        }
        assert {what: text in messages[what] for what, text in expected.items()} == dict.fromkeys(expected, True)


@pytest.mark.parametrize(
    ("config", "layout", "message"),
    [
        (model_config(num_key_value_heads=1), LAYOUTS["tensor"], "exceeds the 1 key-value heads"),
        (model_config(num_key_value_heads=4), Layout(3, LAYERS, (8,), 2), "does not divide its 4 heads"),
        (model_config(intermediate_size=97), LAYOUTS["tensor"], "does not divide its 97 feed-forward width"),
        (model_config(), Layout(1, ((0, 5),), (8,), 2), "hold 5 layers, the model has 4"),
        (model_config(rope_parameters={"rope_type": "yarn", "factor": 4.0}), LAYOUTS["one"], "yarn"),
    ],
)
def test_a_model_that_does_not_fit_the_layout_is_refused(
    worlds: Worlds, config: dict[str, Any], layout: Layout, message: str
) -> None:
    with pytest.raises(HetrlError, match=message):
        worlds.outcome(Job(config, layout, token_batch()))


def no_training(rank: int, port: int, job: Job) -> str:
    """Return the error of a step on an engine without optimiser."""
    engine = start_engine(rank, port, job)
    engine.load(weights(job.config))
    return message_of(lambda: engine.train_step(job.batch, LossSettings()))


def test_an_engine_without_optimizer_only_scores(worlds: Worlds) -> None:
    (message,) = worlds.run(no_training, 1, Job(model_config(), LAYOUTS["one"], token_batch()))
    assert "only scores" in message


def lonely(rank: int, port: int, seconds: float) -> str:
    """Return the error of a rank that waits for others."""
    from hetrl.runtime.megatron.engine import start_world

    return message_of(lambda: start_world(rank, 2, store_at(rank, port), seconds, "cpu"))


def test_a_world_that_does_not_complete_names_who_was_waited_for(worlds: Worlds) -> None:
    (message,) = worlds.run(lonely, 1, 1.0)
    assert "rank 0 of 2 waited 1 s for rank 1 (" in message


def reloaded(rank: int, port: int, job: Job) -> tuple[bool, bool]:
    """Return whether an export loads back to the same bits, and whether other weights outlive a step of rate 0."""
    engine = start_engine(rank, port, job)
    engine.load(weights(job.config))
    engine.train_step(job.batch, LossSettings(loss="supervised"))
    stepped = [dict(engine.export())]
    torch.distributed.broadcast_object_list(stepped, src=0)
    engine.load(weights(job.config, seed=1))
    engine.train_step(job.batch, LossSettings(loss="supervised", learning_rate=0.0))
    given = dict(weights(job.config, seed=1))
    outlived = all(torch.equal(tensor, given[name].bfloat16()) for name, tensor in engine.export())
    engine.load(stepped[0].items())
    again = dict(engine.export())
    return all(torch.equal(again[name], stepped[0][name]) for name in again), outlived


@pytest.mark.parametrize("distributed", [False, True])
def test_an_export_loads_back_and_the_main_parameters_follow_a_load(worlds: Worlds, distributed: bool) -> None:
    settings = replace(ADAM, distributed=distributed, weight_decay=0.0)
    config = model_config(tie_word_embeddings=True)
    job = Job(config, LAYOUTS["tensor-pipeline"], token_batch(), optimizer=settings, dtype="bfloat16")
    assert worlds.run(reloaded, 4, job) == [(True, True)] * 4
