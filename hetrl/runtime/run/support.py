"""What can be planned for but not run: said before anything is planned or started."""

from __future__ import annotations

import math
from pathlib import Path

from hetrl.describe.experiment import Experiment, Model
from hetrl.describe.models import critic_of
from hetrl.errors import UsageError
from hetrl.runtime.data.prompts import open_source
from hetrl.runtime.data.rewards import rule_of
from hetrl.runtime.transport.chunks import MESSAGE_BYTES
from hetrl.runtime.weights.model_directory import TINY
from hetrl.workload import architecture

TRAINED_BYTES, SCORED_BYTES = 33, 8  # of a token: its id; to train on it its mask, and at most six numbers in fp32
PADDING_ROWS = 1024  # by which embeddings of one tokenizer may differ: qwen2.5-7b has 128 more than qwen2.5-1.5b


def check_runnable(experiment: Experiment) -> None:
    """Raise UsageError that names the key of an experiment that this runtime cannot run, and what it can."""
    _check_weights("model.weights", experiment.model)
    if experiment.algorithm.kind == "ppo":
        _check_critic(experiment)
    if experiment.reward.has_model and experiment.reward.weights is None:
        raise UsageError(
            "reward.weights: a reward model that nobody trained says nothing; give the directory with its config.json, "
            "tokenizer and safetensors, at the same path at every site"
        )
    if experiment.warm_start is not None and rule_of(experiment.reward, experiment.data) == "math":
        raise UsageError(
            "warm_start: it imitates bare answers, and reward.rule math reads only an answer that is stated as such "
            "(\\boxed{..} or #### ..); leave warm_start out, or set reward.rule: exact"
        )
    _check_messages(experiment)
    open_source(experiment.data)


def _check_messages(experiment: Experiment) -> None:
    """A minibatch goes to the trainer, and a batch to who scores it, as one message, as wide as its longest sample."""
    samples, minibatches = experiment.batch.samples, experiment.algorithm.minibatches
    tokens = experiment.batch.prompt_tokens + experiment.batch.response_tokens
    for key, what, count, of_token in (
        ("algorithm.minibatches", "a minibatch", math.ceil(samples / minibatches), TRAINED_BYTES),
        ("batch.samples", "a batch", samples, SCORED_BYTES),
    ):
        if (size_bytes := count * tokens * of_token) > MESSAGE_BYTES:
            raise UsageError(
                f"{key}: {what} of {count} samples of up to {tokens} tokens has {size_bytes / 1e9:.1f} GB and goes as "
                f"one message, which may have {MESSAGE_BYTES / 1e9:.1f}; take fewer samples in {what}"
            )


def _check_critic(experiment: Experiment) -> None:
    """The critic has weights to start from, and reads the tokens of the actor."""
    critic = critic_of(experiment)
    _check_weights("critic.weights", critic)
    theirs, ours = (architecture(model.architecture).vocabulary for model in (critic, experiment.model))
    if abs(theirs - ours) > PADDING_ROWS:
        raise UsageError(
            f"critic: {critic.architecture} has a vocabulary of {theirs}, the actor's is {ours}; it reads the actor's "
            "tokens, so take one of the same family"
        )


def _check_weights(key: str, model: Model) -> None:
    is_directory = (Path(model.architecture) / "config.json").is_file()
    if model.weights is None and model.architecture != TINY and not is_directory:
        raise UsageError(
            f"{key}: {model.architecture} is only a shape here; give the directory with its config.json, "
            "tokenizer and safetensors, at the same path at every site"
        )
