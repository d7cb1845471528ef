"""The steps in which our training is held against TRL's: tiny models, ragged groups, settings of both programs.

`trl_reference` writes what TRL makes of them to `REFERENCE`; `test_trl` holds the engine against that file.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy
from numpy.typing import NDArray

from hetrl.describe.algorithm import AlgorithmSection
from hetrl.runtime.data.prompts import Prompt
from hetrl.runtime.rl.sampling import PromptGroup
from hetrl.runtime.wire import Sample, VersionSpan
from tests.engines.megatron.megatron_worlds import model_config

REFERENCE = Path(__file__).parents[2] / "golden" / "trl.safetensors"
VOCABULARY, PAD_TOKEN = 64, 63
LONGEST = 10  # response tokens that were allowed
SMALL = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "head_dim": 8, "initializer_range": 0.2}
MODELS = {
    "qwen3": model_config("qwen3", **SMALL),
    "llama": model_config("llama", **SMALL, rms_norm_eps=1e-5),
}
PROMPTS = (2, 6, 3, 1)  # tokens
RESPONSES = ((5, 9, 1), (3, 4, 8), (10, 2, 6), (7, 3, 5))
REWARDS = ((1.0, 0.0, 0.5), (0.0, 1.0, 1.0), (0.25, 0.25, 0.25), (0.2, 0.0, 0.7))


@dataclass(frozen=True)
class Case:
    """A step as ours and as TRL's GRPOConfig; with `fresh` the old log-probs are the step's own, else the sampler's."""

    ours: dict[str, Any]
    theirs: dict[str, Any]
    fresh: bool = False

    @property
    def algorithm(self) -> AlgorithmSection:
        """Return our side; TRL adds 1e-4 to the deviation of a group's rewards, and takes no other."""
        stale = {} if self.fresh else {"mode": "async", "max_staleness": 1, "objective": "coupled"}
        return AlgorithmSection(advantage_epsilon=1e-4, **stale, **self.ours)


CASES = {
    "token-mean": Case(
        {"clip_high": 0.28, "kl_coefficient": 0.1},
        {"loss_type": "dapo", "epsilon_high": 0.28, "beta": 0.1},
    ),
    "token-mean, tempered": Case(
        {"clip_low": 0.1, "dual_clip": 1.5, "kl_coefficient": 0.04, "entropy_coefficient": 0.05, "temperature": 0.7},
        {
            **{"loss_type": "bnpo", "epsilon": 0.1, "epsilon_high": 0.2, "delta": 1.5},
            **{"beta": 0.04, "entropy_coef": 0.05, "temperature": 0.7},
        },
    ),
    "sequence-mean": Case(
        {"normalisation": "sequence-mean", "clip_high": 0.3, "kl_coefficient": 0.04, "temperature": 1.2},
        {"loss_type": "grpo", "epsilon_high": 0.3, "beta": 0.04, "temperature": 1.2},
    ),
    "constant": Case(
        {"normalisation": "constant", "normalisation_tokens": LONGEST, "advantage_std": "none"},
        {"loss_type": "dr_grpo", "scale_rewards": "none"},
    ),
    "first step, truncated": Case(
        {"correction": "truncate", "correction_cap": 1.5, "kl_coefficient": 0.1},
        {
            **{"loss_type": "dapo", "beta": 0.1},
            **{"vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": 1.5},
        },
        fresh=True,
    ),
    "first step, masked": Case(
        {"normalisation": "sequence-mean", "correction": "mask", "correction_bounds": (0.6, 1.6)},
        {
            **{"loss_type": "grpo", "vllm_importance_sampling_mode": "token_mask"},
            **{"vllm_importance_sampling_clip_min": 0.6, "vllm_importance_sampling_clip_max": 1.6},
        },
        fresh=True,
    ),
}


@cache
def groups() -> tuple[PromptGroup, ...]:
    """Return prompts and responses of different lengths, random, with rewards and the sampler's log-probs."""
    random = numpy.random.default_rng(0)

    def tokens(length: int) -> tuple[int, ...]:
        return tuple(random.integers(0, PAD_TOKEN, length).tolist())

    def sample(length: int) -> Sample:
        logprobs = tuple((-random.uniform(3.5, 5.0, length)).astype(numpy.float32).tolist())
        spans = (VersionSpan(0, 0, length),)
        return Sample(tokens=tokens(length), logprobs=logprobs, versions=spans, finish_reason="stop")

    return tuple(
        PromptGroup(Prompt(f"prompt {number}", ""), tokens(prompt), tuple(map(sample, responses)), rewards)
        for number, (prompt, responses, rewards) in enumerate(zip(PROMPTS, RESPONSES, REWARDS, strict=True))
    )


@cache
def reference_logprobs() -> NDArray[numpy.float32]:
    """Return the reference's log-prob of each response token, one sample after the other."""
    tokens = sum(map(sum, RESPONSES))
    return (-numpy.random.default_rng(1).uniform(3.5, 5.0, tokens)).astype(numpy.float32)
