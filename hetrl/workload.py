"""What is trained: model architectures, the six tasks of RL post-training and the dataflow graph G.

Sources: HetRL (arXiv 2512.12476) section 3 for the tasks and edges; the models' published `config.json` for the shapes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from hetrl.errors import UsageError, nearest
from hetrl.files import read_json
from hetrl.lengths import Lengths

ACTOR_GENERATION = "actor_generation"
REFERENCE_INFERENCE = "reference_inference"
REWARD_INFERENCE = "reward_inference"
CRITIC_INFERENCE = "critic_inference"
ACTOR_TRAINING = "actor_training"
CRITIC_TRAINING = "critic_training"
INFERENCES = (REFERENCE_INFERENCE, REWARD_INFERENCE, CRITIC_INFERENCE)
TRAININGS = (ACTOR_TRAINING, CRITIC_TRAINING)
TASKS = (ACTOR_GENERATION, *INFERENCES, *TRAININGS)
# Each model that is trained: the task that trains it, and the one that takes every version of its weights.
TRAINED = {"actor": (ACTOR_TRAINING, ACTOR_GENERATION), "critic": (CRITIC_TRAINING, CRITIC_INFERENCE)}
SCALAR_CLASS = "ForSequenceClassification"  # how transformers' classes of models with a scalar head end
HEAD_CHUNK_BYTES = 2**28  # of float32 logits, which our training engine makes chunk by chunk
# What a step of a run takes besides its tasks: until the trainer has a batch; as a part of the actor's training, until
# it has scored the batch; until a version of the actor's weights, or of the critic's, is where it is used.
GENERATION_WAIT = "generation_wait"
OLD_LOGPROBS = "old_logprobs"
WEIGHT_SYNC, CRITIC_WEIGHT_SYNC = "weight_sync", "critic_weight_sync"
ITERATION = "iteration"  # what all of it takes
ENGINE_OF_TASK = {task: "vllm" if task == ACTOR_GENERATION else "megatron" for task in TASKS}


@dataclass(frozen=True)
class Architecture:
    """The shape of a dense decoder-only transformer; every count below is exact.

    `positions` counts learned position embeddings (0 for rotary and ALiBi); `gated_mlp` is SwiGLU (three matrices)
    against two; `linear_bias` puts a bias on every matrix of a layer, `qkv_bias` on q, k and v alone;
    `norm_parameters` is the number of vectors of a norm (1: RMSNorm or LayerNorm without bias, 2: with bias);
    `scalar_head`: it gives one number per token, a value or a reward, instead of logits.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    tied_embeddings: bool = False
    qkv_bias: bool = False
    linear_bias: bool = False
    qk_norm: bool = False
    gated_mlp: bool = True
    norm_parameters: int = 1
    positions: int = 0
    scalar_head: bool = False
    source: str = ""

    @property
    def embedding_parameters(self) -> int:
        """Return the parameters of the input embedding."""
        return self.vocabulary * self.hidden

    @property
    def head_parameters(self) -> int:
        """Return the parameters of the output layer, tied or not (what the last product reads)."""
        return self.hidden if self.scalar_head else self.vocabulary * self.hidden

    @cached_property
    def layer_matrix_parameters(self) -> int:
        """Return the parameters of the matrices of one layer: q, k, v, o and the feed-forward."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return attention + (3 if self.gated_mlp else 2) * self.hidden * self.intermediate

    @cached_property
    def layer_parameters(self) -> int:
        """Return all parameters of one layer, norms and biases included."""
        norms = 2 * self.norm_parameters * self.hidden + (2 * self.head_dim if self.qk_norm else 0)
        qkv_outputs = (self.heads + 2 * self.kv_heads) * self.head_dim
        other_outputs = 2 * self.hidden + (2 if self.gated_mlp else 1) * self.intermediate
        biases = (qkv_outputs if self.qkv_bias or self.linear_bias else 0) + (other_outputs if self.linear_bias else 0)
        return self.layer_matrix_parameters + norms + biases

    @cached_property
    def parameters(self) -> int:
        """Return all parameters; a tied embedding counts once."""
        head = 0 if self.tied_embeddings else self.head_parameters
        return (
            self.layers * self.layer_parameters
            + self.embedding_parameters
            + head
            + self.positions * self.hidden
            + self.norm_parameters * self.hidden
        )

    @property
    def kv_bytes_per_token_layer(self) -> int:
        """Return the bf16 bytes of the keys and values of one token in one layer."""
        return 2 * self.kv_heads * self.head_dim * 2


def architecture_from_hf_config(config: Mapping[str, Any], name: str) -> Architecture:
    """Read a Hugging Face `config.json` of the Qwen2, Qwen3 or Llama families.

    One that is for sequence classification (`architectures`), as reward models are, has a scalar head. Raises
    UsageError for another `model_type`, biases that these families publish nowhere, a missing key or a value that is no
    number.
    """
    kind = config.get("model_type")
    if kind not in ("qwen2", "qwen3", "llama"):
        raise UsageError(f'{name}: model_type "{kind}" is not supported; known: qwen2, qwen3, llama')
    for key in ("attention_bias", "mlp_bias"):
        if config.get(key):
            raise UsageError(f"{name}: config.json sets {key}; {kind} models with it are not supported")
    try:
        heads = int(config["num_attention_heads"])
        scalar = any(str(one).endswith(SCALAR_CLASS) for one in config.get("architectures") or ())
        return Architecture(
            name=name,
            layers=int(config["num_hidden_layers"]),
            hidden=int(config["hidden_size"]),
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or int(config["hidden_size"]) // heads),
            intermediate=int(config["intermediate_size"]),
            vocabulary=int(config["vocab_size"]),
            tied_embeddings=bool(config.get("tie_word_embeddings", False)) and not scalar,
            qkv_bias=kind == "qwen2",
            qk_norm=kind == "qwen3",
            scalar_head=scalar,
            source="config.json",
        )
    except KeyError as missing:
        raise UsageError(f"{name}: config.json has no {missing}; it is not a Hugging Face {kind} model") from None
    except (TypeError, ValueError) as error:
        raise UsageError(f"{name}: config.json holds a value that is no whole number: {error}") from None


@cache
def architecture_catalogue() -> Mapping[str, Architecture]:
    """Return the catalogue (`hetrl/catalogue/architectures.yaml`) by name."""
    text = resources.files("hetrl.catalogue").joinpath("architectures.yaml").read_text()
    return {name: Architecture(name=name, **entry) for name, entry in yaml.safe_load(text).items()}


def architecture(name: str) -> Architecture:
    """Return a catalogue entry, or read the `config.json` of the directory of this name; UsageError otherwise."""
    catalogue = architecture_catalogue()
    if name in catalogue:
        return catalogue[name]
    path = Path(name) / "config.json"
    if path.is_file():
        config = read_json(path)
        if not isinstance(config, dict):
            raise UsageError(f"{path}: expected keys and values, found {type(config).__name__}")
        return architecture_from_hf_config(config, name)
    raise UsageError(
        f'unknown architecture "{name}"{nearest(name, catalogue)}; give a catalogue name '
        "or a directory with a Hugging Face config.json"
    )


def has_language_head(task: str) -> bool:
    """Return whether the task's model ends in the vocabulary; the others give one number per token."""
    return task in (ACTOR_GENERATION, ACTOR_TRAINING, REFERENCE_INFERENCE)


def needs_old_logprobs(optimizer_steps: int, kl_in_reward: bool, ratio_to_sampler: bool) -> bool:
    """Return whether a batch must be scored under the weights of the iteration's start, ahead of its optimiser steps.

    The ratio of PPO and GRPO is to those log-probs, and where there is one step its own, detached, are the same. A KL
    penalty in the reward comes before the advantages, and so before every step. A ratio to the sampler's log-probs
    needs none of the trainer's.
    """
    return kl_in_reward or (optimizer_steps > 1 and not ratio_to_sampler)


def versions_ahead(trained: str, staleness: int) -> tuple[str, ...]:
    """Return the models whose versions go ahead of those of `trained` on links that both take.

    In mode sync the actor's go first: generation of the next samples waits for them, the critic's has all of that
    generation to arrive in. In mode async versions of both follow one another, and whatever waited for gaps that the
    other leaves would hold its own next version up.
    """
    names = [*TRAINED]
    return tuple(names[: names.index(trained)]) if staleness == 0 else ()


def scores_beside_inferences(scores_batch: bool, staleness: int, group: Collection[str]) -> bool:
    """Return whether the actor's trainer scores a batch while others infer, and has its devices from then on.

    `group` has the tasks that share them. Generation that goes on there in mode async would stand still for as long as
    the other groups take: then the trainer scores when everything else of the batch is there.
    """
    return scores_batch and not (staleness > 0 and ACTOR_GENERATION in group)


@dataclass(frozen=True)
class Workload:
    """One RL post-training job as the planner sees it: an iteration handles `samples` sequences."""

    algorithm: str  # ppo | grpo
    mode: str  # sync | async
    max_staleness: int
    samples: int
    samples_per_prompt: int
    prompt_tokens: int
    response: Lengths
    optimizer_steps_per_iteration: int
    actor: Architecture
    critic: Architecture | None = None
    reference: Architecture | None = None
    reward: Architecture | None = None
    weight_bytes: int = 2  # bytes per parameter of the weights that compute and travel: bf16, or 4 for fp32
    epochs: int = 1
    gradient_dtype: str = "fp32"  # fp32 | bf16: what the data-parallel reduction of every training sends
    kl_in_reward: bool = False  # whether a KL penalty is taken off the rewards
    ratio_to_sampler: bool = False  # whether the ratio of the loss is to the sampler's log-probs, not to the trainer's
    renews_contexts: bool = True  # whether a version has the keys and values of requests under way computed anew

    @cached_property
    def tasks(self) -> tuple[str, ...]:
        """Return the tasks that need devices, in the order of `TASKS`."""
        return tuple(task for task in TASKS if self.architecture_of(task) is not None)

    def architecture_of(self, task: str) -> Architecture | None:
        """Return the model that a task runs; None where the job has no such task."""
        return {
            ACTOR_GENERATION: self.actor,
            ACTOR_TRAINING: self.actor,
            REFERENCE_INFERENCE: self.reference,
            REWARD_INFERENCE: self.reward,
            CRITIC_INFERENCE: self.critic,
            CRITIC_TRAINING: self.critic,
        }[task]

    @cached_property
    def edges(self) -> tuple[tuple[str, str], ...]:
        """Return the dataflow graph: generation -> inferences -> trainings -> (weight sync) -> generation."""
        inferences = [task for task in INFERENCES if task in self.tasks]
        trainings = [task for task in TRAININGS if task in self.tasks]
        middle = inferences or [ACTOR_GENERATION]
        forward = [(ACTOR_GENERATION, task) for task in inferences]
        return (*forward, *((a, b) for a in middle for b in trainings), (ACTOR_TRAINING, ACTOR_GENERATION))

    @property
    def scores_batch(self) -> bool:
        """Return whether the actor's trainer scores a batch ahead of its steps (`needs_old_logprobs`)."""
        return needs_old_logprobs(self.optimizer_steps_per_iteration, self.kl_in_reward, self.ratio_to_sampler)

    @property
    def staleness(self) -> int:
        """Return how many versions a sample may be behind: 0 in mode sync."""
        return self.max_staleness if self.mode == "async" else 0

    @property
    def sequence_tokens(self) -> float:
        """Return the mean length of prompt plus response."""
        return self.prompt_tokens + self.response.mean

    @cached_property
    def attended_tokens(self) -> float:
        """Return the length of the sequence that a token is in, on average over tokens: E[s^2] / E[s]."""
        return self.sequence_tokens + self.response.deviation**2 / self.sequence_tokens

    @property
    def max_sequence_tokens(self) -> int:
        """Return the longest possible sequence."""
        return self.prompt_tokens + self.response.maximum
