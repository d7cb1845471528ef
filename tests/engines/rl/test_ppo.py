"""An iteration of PPO on ragged samples, held against a page of torch and transformers that shares nothing with it.

The page goes sample by sample and token by token, as the papers write it; we go by arrays, engines and layouts.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import numpy
import pytest
import torch

from hetrl.describe.algorithm import AlgorithmSection
from hetrl.describe.experiment import Critic
from hetrl.runtime import wire
from hetrl.runtime.data.prompts import Prompt
from hetrl.runtime.megatron.batch import TokenBatch
from hetrl.runtime.megatron.hf_weights import with_scalar_head
from hetrl.runtime.rl.critic import critic_batch, value_settings
from hetrl.runtime.rl.experience import experience, loss_settings, minibatches, policy_batch, valued_batch
from hetrl.runtime.rl.sampling import PromptGroup
from hetrl.runtime.wire import LossSettings
from tests.engines.megatron.megatron_worlds import (
    ADAM,
    LAYOUTS,
    Job,
    Worlds,
    assert_same,
    model_config,
    start_engine,
    weights,
)

ACTOR, CRITIC = model_config(), with_scalar_head(model_config(num_hidden_layers=4, intermediate_size=80))
ALGORITHM = AlgorithmSection(
    kind="ppo", epochs=2, kl_coefficient=0.1, kl_in="reward", kl_estimator="k1", discount=0.99, trace=0.9
)
CRITIC_SETTINGS = Critic(learning_rate=ADAM.learning_rate, value_clip=0.05)
SAMPLES = (((5, 9, 17), (3, 8, 2)), ((44,), (7, 7, 19, 23, 1, 90)), ((2, 3), (11,)), ((101, 6, 77), (4, 5, 6, 7, 8)))
REWARDS = (1.0, -0.5, 0.25, 2.0)
ACTOR_SEED, REFERENCE_SEED, CRITIC_SEED = 0, 1, 2


def model_of(config: dict[str, Any], seed: int) -> Any:
    """Return the model of transformers with these weights."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

    kind = AutoModelForSequenceClassification if "id2label" in config else AutoModelForCausalLM
    model = kind.from_config(AutoConfig.for_model(**config, pad_token_id=0), attn_implementation="eager")
    model.load_state_dict(dict(weights(config, seed)))
    return model.float()


def logprobs_of(model: Any, prompt: tuple[int, ...], response: tuple[int, ...]) -> torch.Tensor:
    tokens = torch.tensor([[*prompt, *response]])
    every = model(tokens).logits[0].log_softmax(-1)
    return torch.stack([every[len(prompt) + place - 1, token] for place, token in enumerate(response)])


def values_of(model: Any, prompt: tuple[int, ...], response: tuple[int, ...]) -> torch.Tensor:
    tokens = torch.tensor([[*prompt, *response]])
    every = model.score(model.model(tokens).last_hidden_state)[0, :, 0]
    return every[len(prompt) - 1 : len(prompt) + len(response) - 1]


def page() -> dict[str, Any]:
    """Return advantages, returns, the metrics of both steps and the weights after them."""
    actor, reference, critic = (
        model_of(ACTOR, ACTOR_SEED),
        model_of(ACTOR, REFERENCE_SEED),
        model_of(CRITIC, CRITIC_SEED),
    )
    with torch.no_grad():
        old = [logprobs_of(actor, *sample) for sample in SAMPLES]
        far = [logprobs_of(reference, *sample) for sample in SAMPLES]
        old_values = [values_of(critic, *sample) for sample in SAMPLES]
    advantages, returns = [], []
    for reward, ours, theirs, values in zip(REWARDS, old, far, old_values, strict=True):
        later_value, later_advantage, row = 0.0, 0.0, []
        for place in reversed(range(len(values))):
            earned = -0.1 * float(ours[place] - theirs[place]) + (reward if place == len(values) - 1 else 0.0)
            error = earned + 0.99 * later_value - float(values[place])
            later_advantage, later_value = error + 0.99 * 0.9 * later_advantage, float(values[place])
            row.insert(0, later_advantage)
        advantages.append(torch.tensor(row))
        returns.append(advantages[-1] + values)
    every = torch.cat(advantages)
    white = (every - every.mean()) / every.std()
    seen: dict[str, Any] = {"advantages": white, "returns": torch.cat(returns), "policy": [], "value": []}
    for model, name in ((actor, "policy"), (critic, "value")):
        optimizer = adam(model)
        for _ in range(ALGORITHM.epochs):
            if name == "policy":
                ratio = (torch.cat([logprobs_of(model, *sample) for sample in SAMPLES]) - torch.cat(old)).exp()
                loss = -torch.minimum(ratio * white, ratio.clamp(0.8, 1.2) * white).mean()
            else:
                values, before = torch.cat([values_of(model, *sample) for sample in SAMPLES]), torch.cat(old_values)
                held = before + (values - before).clamp(-0.05, 0.05)
                errors = torch.maximum((values - seen["returns"]) ** 2, (held - seen["returns"]) ** 2)
                loss = errors.mean() / 2
            optimizer.zero_grad()
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), ADAM.clip_grad)
            optimizer.step()
            seen[name].append((loss.item(), float(norm)))
        seen[f"{name} weights"] = {key: tensor.detach() for key, tensor in model.state_dict().items()}
    return seen


def adam(model: Any) -> torch.optim.AdamW:
    decaying = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    plain = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    groups = [{"params": decaying, "weight_decay": ADAM.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=ADAM.learning_rate, betas=(ADAM.beta1, ADAM.beta2), eps=ADAM.eps)


def scored(rank: int, port: int, argument: tuple[Job, int, str]) -> Any:
    """Return what a model says of a batch, on rank 0."""
    job, seed, what = argument
    engine = start_engine(rank, port, job)
    engine.load(weights(job.config, seed))
    scores = engine.score(job.batch, what=what)
    engine.close()
    return scores


def trained(rank: int, port: int, argument: tuple[Job, int, list[TokenBatch]]) -> Any:
    """Take a step on each batch; return losses and gradient norms, and the weights afterwards."""
    job, seed, batches = argument
    engine = start_engine(rank, port, replace(job, optimizer=ADAM))
    engine.load(weights(job.config, seed))
    metrics = [engine.train_step(batch, job.settings) for batch in batches]
    exported = dict(engine.export())
    engine.close()
    return [(row["loss"], row["grad_norm"]) for row in metrics], exported


def groups() -> tuple[PromptGroup, ...]:
    """Return the samples as the sampler gives them, each of a prompt of its own."""
    return tuple(
        PromptGroup(Prompt("", ""), prompt, (sample_of(response),), (reward,))
        for (prompt, response), reward in zip(SAMPLES, REWARDS, strict=True)
    )


def sample_of(response: tuple[int, ...]) -> wire.Sample:
    spans = (wire.VersionSpan(version=1, start=0, end=len(response)),)
    return wire.Sample(tokens=response, logprobs=(-1.0,) * len(response), versions=spans, finish_reason="stop")


def engine_batch(part: dict[str, Any]) -> TokenBatch:
    rest = {name: array for name, array in part.items() if name not in ("tokens", "lengths", "mask")}
    return TokenBatch(part["tokens"], part["lengths"], part["mask"], rest)


@pytest.mark.parametrize("layout", ["one", "tensor-pipeline", "data"])
def test_an_iteration_is_that_of_the_page(worlds: Worlds, layout: str) -> None:
    expected, arrays = page(), experience(groups(), pad_token=0)
    shape, size = LAYOUTS[layout], LAYOUTS[layout].world_size
    plain = engine_batch(arrays)
    for name, config, seed, what in (
        ("old_logprobs", ACTOR, ACTOR_SEED, "logprobs"),
        ("reference_logprobs", ACTOR, REFERENCE_SEED, "logprobs"),
        ("values", CRITIC, CRITIC_SEED, "values"),
    ):
        arrays[name] = worlds.run(scored, size, (Job(config, shape, plain), seed, what))[0]
    batch, _ = valued_batch(arrays, groups(), ALGORITHM)
    policy, _ = policy_batch(batch, groups(), 1, ALGORITHM)
    mask = batch["mask"]
    numpy.testing.assert_allclose(batch["advantages"][mask], expected["advantages"].numpy(), atol=1e-5)
    numpy.testing.assert_allclose(batch["returns"][mask], expected["returns"].numpy(), atol=1e-5)
    trainings: tuple[tuple[str, dict[str, Any], int, dict[str, Any], LossSettings], ...] = (
        ("policy", ACTOR, ACTOR_SEED, policy, loss_settings(ALGORITHM)),
        ("value", CRITIC, CRITIC_SEED, critic_batch(batch), value_settings(CRITIC_SETTINGS)),
    )
    for name, config, seed, own, settings in trainings:
        (part,) = minibatches(own, 1, ALGORITHM)
        job = Job(config, shape, engine_batch(part), msgspec.structs.replace(settings, learning_rate=None))  # ADAM's
        metrics, exported = worlds.run(trained, size, (job, seed, [job.batch] * ALGORITHM.epochs))[0]
        numpy.testing.assert_allclose(metrics, expected[name], rtol=1e-5, atol=1e-5)
        assert_same(exported, expected[f"{name} weights"], 1e-5)
