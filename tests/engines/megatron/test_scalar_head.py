"""Value and reward models: one number per token instead of logits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy
import pytest
import torch
from safetensors.torch import save_file

from hetrl.errors import HetrlError
from hetrl.runtime.megatron.batch import TokenBatch
from hetrl.runtime.megatron.hf_weights import SCALAR_HEAD, architecture_of, random_weights, with_scalar_head
from hetrl.runtime.wire import LossSettings
from tests.engines.megatron.megatron_worlds import (
    ADAM,
    LAYERS,
    LAYOUTS,
    Job,
    Worlds,
    assert_same,
    message_of,
    model_config,
    start_engine,
    token_batch,
    weights,
)

CLIPPED = LossSettings(loss="value", value_clip=0.2)
FAMILIES = ["qwen3", "qwen2", "llama"]


def critic_config(kind: str = "qwen3", **changes: Any) -> dict[str, Any]:
    return with_scalar_head(model_config(kind, tie_word_embeddings=True, **changes))


def value_batch(samples: int = 8) -> TokenBatch:
    """Return random sequences with the old values and the returns of their tokens."""
    batch, random = token_batch(samples), numpy.random.default_rng(7)
    extras = {name: random.normal(size=batch.mask.shape).astype(numpy.float32) for name in ("old_values", "returns")}
    return replace(batch, extras=extras)


def transformer(config: dict[str, Any]) -> Any:
    """Return the model of transformers with the same weights."""
    from transformers import AutoConfig, AutoModelForSequenceClassification

    described = AutoConfig.for_model(**config, pad_token_id=0)
    assert described.num_labels == 1
    model = AutoModelForSequenceClassification.from_config(described, attn_implementation="eager")
    model.load_state_dict(dict(weights(config)))
    return model.float().eval()


def outputs_of(model: Any, batch: TokenBatch) -> torch.Tensor:
    """Return the score of every token [n, s], zero in padding; one sequence at a time."""
    rows = []
    for tokens, length in zip(batch.tokens, batch.lengths, strict=True):
        states = model.model(torch.from_numpy(tokens[None, :length])).last_hidden_state
        rows.append(torch.nn.functional.pad(model.score(states)[0, :, 0], (0, batch.tokens.shape[1] - int(length))))
    return torch.stack(rows)


def values_of(model: Any, batch: TokenBatch) -> torch.Tensor:
    """Return the value of the text before each token."""
    shifted = torch.nn.functional.pad(outputs_of(model, batch)[:, :-1], (1, 0))
    return torch.where(torch.from_numpy(batch.real), shifted, 0.0)


def scores(rank: int, port: int, job: Job) -> dict[str, Any]:
    """Return values and rewards on rank 0, and what is said of log-probs."""
    engine = start_engine(rank, port, job)
    engine.load(weights(job.config))
    refused = message_of(lambda: engine.score(job.batch))
    found = {what: engine.score(job.batch, what=what) for what in ("values", "rewards")}
    engine.close()
    return {**found, "refused": refused}


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize("layout", ["one", "tensor-pipeline"])
def test_values_and_rewards_agree_with_transformers(worlds: Worlds, kind: str, layout: str) -> None:
    config, batch = critic_config(kind), value_batch(5)
    job = Job(config, LAYOUTS[layout], batch)
    found = worlds.run(scores, job.layout.world_size, job)[0]
    model = transformer(config)
    with torch.no_grad():
        numpy.testing.assert_allclose(found["rewards"], outputs_of(model, batch).numpy(), atol=1e-5)
        numpy.testing.assert_allclose(found["values"], values_of(model, batch).numpy(), atol=1e-5)
        padded = torch.from_numpy(numpy.where(batch.real, batch.tokens, 0))
        mask = torch.from_numpy(batch.real).long()
        theirs = model(padded, attention_mask=mask).logits[:, 0]  # that of the last token that is not padding
    last = found["rewards"][numpy.arange(batch.samples), batch.lengths - 1]
    numpy.testing.assert_allclose(last, theirs.numpy(), atol=1e-5)
    assert 'has no "logprobs"; it has values, rewards' in found["refused"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_of_the_critic_agrees_with_transformers_and_torch(worlds: Worlds, layout: str) -> None:
    config, batch = critic_config(), value_batch()
    outcome = worlds.run(value_steps, LAYOUTS[layout].world_size, Job(config, LAYOUTS[layout], batch, CLIPPED))[0]
    model, mask = transformer(config), torch.from_numpy(batch.mask)
    decaying = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    plain = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    groups = [{"params": decaying, "weight_decay": ADAM.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=ADAM.learning_rate, betas=(ADAM.beta1, ADAM.beta2), eps=ADAM.eps)
    old, returns = (torch.from_numpy(batch.extras[name])[mask] for name in ("old_values", "returns"))
    for metrics in outcome["metrics"]:
        values = values_of(model, batch)[mask]
        plain_loss, held = (values - returns) ** 2, (old + (values - old).clamp(-0.2, 0.2) - returns) ** 2
        loss = 0.5 * torch.maximum(plain_loss, held).mean()
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), ADAM.clip_grad)
        optimizer.step()
        assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-5)
        assert metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-5)
        assert metrics["value_clip_fraction"] == pytest.approx((held > plain_loss).float().mean().item(), rel=1e-5)
    assert_same(outcome["exported"], dict(model.state_dict()), 2e-5)


def value_steps(rank: int, port: int, job: Job) -> dict[str, Any]:
    """Take two steps; return their metrics and the weights afterwards."""
    engine = start_engine(rank, port, replace(job, optimizer=ADAM))
    engine.load(weights(job.config))
    metrics = [engine.train_step(job.batch, job.settings) for _ in range(2)]
    exported = dict(engine.export())
    engine.close()
    return {"metrics": metrics, "exported": exported}


def from_files(rank: int, port: int, argument: tuple[Job, Path, int | None]) -> dict[str, torch.Tensor] | str:
    """Load a model from files, with a head of its own where a seed is given; return what was loaded, or the error."""
    job, directory, seed = argument
    engine = start_engine(rank, port, job)
    try:
        engine.load_files(directory, head_seed=seed)
        return dict(engine.export())
    except HetrlError as error:
        return str(error)
    finally:
        engine.close()


def test_a_critic_starts_from_a_language_model_with_a_head_of_its_own(worlds: Worlds, tmp_path: Path) -> None:
    language = dict(weights(model_config()))
    save_file(language, tmp_path / "model.safetensors")
    config = with_scalar_head(model_config())
    job = Job(config, LAYOUTS["tensor-pipeline"], value_batch())
    loaded = worlds.run(from_files, 4, (job, tmp_path, 3))[0]
    head = dict(random_weights(config, 3))[SCALAR_HEAD]
    expected = {name: tensor for name, tensor in language.items() if name != "lm_head.weight"} | {SCALAR_HEAD: head}
    assert_same(loaded, expected, 0.0)
    assert 0.5 < float(head.std()) * 65**0.5 < 1.5
    for refused in worlds.run(from_files, 4, (job, tmp_path, None)):
        assert "1 tensors are missing: score.weight" in refused


def test_the_files_head_wins_over_one_that_would_be_drawn(worlds: Worlds, tmp_path: Path) -> None:
    config = critic_config()
    save_file(dict(weights(config)), tmp_path / "model.safetensors")
    job = Job(config, LAYOUTS["tensor"], value_batch())
    loaded = worlds.run(from_files, 2, (job, tmp_path, 3))[0]
    assert_same(loaded, dict(weights(config)), 0.0)


def saved(rank: int, port: int, argument: tuple[Job, Path]) -> dict[str, torch.Tensor]:
    """Take a step and save a checkpoint; return the weights."""
    job, directory = argument
    engine = start_engine(rank, port, job)
    engine.load(weights(job.config))
    engine.train_step(job.batch, job.settings)
    exported = dict(engine.export())
    engine.save(directory, {})
    engine.finish_save()
    engine.close()
    return exported


def restored(rank: int, port: int, argument: tuple[Job, Path]) -> dict[str, torch.Tensor]:
    job, directory = argument
    engine = start_engine(rank, port, job)
    engine.restore(directory)
    exported = dict(engine.export())
    engine.close()
    return exported


def test_a_checkpoint_of_a_critic_is_a_model_of_transformers_and_resumes_on_another_layout(
    worlds: Worlds, tmp_path: Path
) -> None:
    from transformers import AutoModelForSequenceClassification

    directory = tmp_path / "step-00000001"
    job = Job(critic_config(), LAYOUTS["tensor-data"], value_batch(), CLIPPED, optimizer=ADAM)
    exported = worlds.run(saved, 4, (job, directory))[0]
    model = AutoModelForSequenceClassification.from_pretrained(directory, dtype=torch.float32)
    assert_same(exported, dict(model.state_dict()), 0.0)
    again = worlds.run(restored, 2, (replace(job, layout=LAYOUTS["pipeline"]), directory))[0]
    assert_same(exported, again, 0.0)


def refusals(rank: int, port: int, job: Job) -> list[str]:
    """Return what is said of losses that are not for the engine's head, and of a batch without what a loss reads."""
    engine = start_engine(rank, port, job)
    engine.load(weights(job.config))
    messages = [
        message_of(lambda: engine.train_step(job.batch, LossSettings(loss="supervised"))),
        message_of(lambda: engine.train_step(replace(job.batch, extras={}), CLIPPED)),
        message_of(lambda: engine.train_step(job.batch, msgspec.structs.replace(CLIPPED, clip_low=0.1))),
    ]
    engine.close()
    return messages


def test_losses_of_the_other_head_are_refused(worlds: Worlds) -> None:
    job = Job(critic_config(), LAYOUTS["one"], value_batch(), optimizer=ADAM)
    (found,) = worlds.run(refusals, 1, job)
    assert "its scalar head is not trained with the loss supervised" in found[0]
    assert 'the batch has no "old_values"' in found[1]
    assert 'unknown hyper-parameter "clip_low"; known: learning_rate, temperature, value_clip' in found[2]


def test_parameters_of_a_critic_count_one_row_for_the_head() -> None:
    config = critic_config()
    assert architecture_of(config).parameters == sum(tensor.numel() for _, tensor in random_weights(config, 0))
    assert ((0, architecture_of(config).layers),) == LAYERS
