"""The section `algorithm` of an experiment file: PPO or GRPO, and their knobs."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field, model_validator

from hetrl.describe.yaml_file import AtLeastOne, NotNegative, Positive, Strict
from hetrl.workload import needs_old_logprobs

Decay = Literal["none", "linear", "cosine"]
Share = Annotated[float, Field(ge=0, le=1)]
OF_PPO = ("discount", "trace", "whiten_advantages", "whiten_rewards")
OF_GRPO = ("advantages", "advantage_std", "advantage_epsilon", "dynamic_sampling")


def scheduled(learning_rate: float, step: int, steps: int, warmup: int, decay: Decay) -> float:
    """Return the learning rate of the first, second, ... of so many steps.

    It rises evenly to its value over `warmup` steps, and then falls in a line or half a cosine wave, to be zero behind
    the last step.
    """
    passed = min(1.0, max(0, step - warmup) / max(1, steps - warmup + 1))
    left = {"none": 1.0, "linear": 1.0 - passed, "cosine": (1.0 + math.cos(math.pi * passed)) / 2}[decay]
    return learning_rate * min(1.0, step / max(1, warmup)) * left


class DynamicSampling(Strict):
    """Prompts whose samples all have the same reward are drawn again, up to `max_draws` x the prompts of a batch."""

    max_draws: Annotated[int, Field(ge=2)]


class AlgorithmSection(Strict):
    """PPO or GRPO and their knobs."""

    kind: Literal["ppo", "grpo"] = "grpo"
    mode: Literal["sync", "async"] = "sync"
    max_staleness: Annotated[int, Field(ge=0)] = 0
    samples_per_prompt: AtLeastOne = 8
    dynamic_sampling: DynamicSampling | None = None
    minibatches: AtLeastOne = 1
    epochs: AtLeastOne = 1
    learning_rate: Positive = 1e-6
    learning_rate_warmup: Annotated[int, Field(ge=0)] = 0
    learning_rate_decay: Decay = "none"
    kl_coefficient: NotNegative = 0.0
    kl_in: Literal["loss", "reward"] = "loss"
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    ratio: Literal["token", "sequence"] = "token"
    clip_low: Positive = 0.2
    clip_high: Positive = 0.2
    dual_clip: Annotated[float, Field(gt=1, allow_inf_nan=False)] | None = None
    entropy_coefficient: NotNegative = 0.0
    temperature: Positive = 1.0
    on_update: Literal["recompute", "continue"] = "recompute"
    advantages: Literal["grpo", "rloo", "reinforce++", "reinforce++-baseline"] = "grpo"
    discount: Share = 1.0
    trace: Share = 0.95
    whiten_advantages: bool = True
    whiten_rewards: bool = False
    advantage_std: Literal["unbiased", "batch", "none"] = "unbiased"
    advantage_epsilon: Positive = 1e-6
    mask_truncated: bool = False
    normalisation: Literal["token-mean", "sequence-mean", "constant"] = "token-mean"
    normalisation_tokens: AtLeastOne | None = None
    objective: Literal["decoupled", "coupled"] = "decoupled"
    correction: Literal["none", "truncate", "mask"] | None = None
    correction_cap: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 2.0
    correction_bounds: tuple[NotNegative, NotNegative] = (0.5, 5.0)

    @model_validator(mode="after")
    def _keys_fit_together(self) -> AlgorithmSection:
        for key in self.changed(*(OF_GRPO if self.kind == "ppo" else OF_PPO)):
            other = "grpo, whose advantages are relative" if self.kind == "ppo" else "ppo, which has a critic"
            raise ValueError(f"{key} is for kind {other}: leave it out")
        if self.mode == "sync" and self.max_staleness:
            raise ValueError("max_staleness is for mode async; in mode sync it is 0")
        if self.dynamic_sampling and self.samples_per_prompt < 2:
            raise ValueError("dynamic_sampling compares the samples of a prompt: raise samples_per_prompt")
        if self.kind == "grpo" and self.advantages != "reinforce++" and self.samples_per_prompt < 2:
            raise ValueError(
                f"advantages {self.advantages} compares the samples of a prompt, and one alone has none: raise "
                "samples_per_prompt, or set advantages reinforce++"
            )
        if (self.normalisation == "constant") != (self.normalisation_tokens is not None):
            raise ValueError("normalisation_tokens goes with normalisation constant, and only with it")
        if self.advantages != "grpo" and self.advantage_std != "unbiased":
            raise ValueError(f"advantage_std is for advantages grpo, not for {self.advantages}: leave it out")
        low, high = self.correction_bounds
        if not low <= 1 <= high:
            raise ValueError("correction_bounds must be [low, high] with low <= 1 <= high")
        if self.importance_bound != "none" and self.objective == "coupled" and self.max_staleness:
            raise ValueError(
                "correction weighs the trainer's log-probs against the sampler's; objective coupled with stale samples "
                "uses the sampler's alone: set correction none or objective decoupled"
            )
        return self

    def learning_rate_at(self, step: int, steps: int) -> float:
        """Return the learning rate of the policy's first, second, ... of so many steps."""
        return scheduled(self.learning_rate, step, steps, self.learning_rate_warmup, self.learning_rate_decay)

    @property
    def max_draws(self) -> int:
        """Return how many groups a batch may draw for each that it takes."""
        return self.dynamic_sampling.max_draws if self.dynamic_sampling else 1

    @property
    def kl_in_reward(self) -> bool:
        """Return whether a KL penalty is taken off the rewards."""
        return self.kl_coefficient > 0 and self.kl_in == "reward"

    @property
    def ratio_to_sampler(self) -> bool:
        """Return whether the ratio of the loss is to the log-probs of the policy that drew the tokens."""
        return self.max_staleness > 0 and self.objective == "coupled"

    @property
    def renews_contexts(self) -> bool:
        """Return whether generation computes anew, under a version of weights, what it kept under the one before.

        In mode sync always: nothing is under way then, and what is kept of a prompt would not be the samples' policy's.
        """
        return self.on_update == "recompute" or not self.max_staleness

    @property
    def importance_bound(self) -> Literal["none", "truncate", "mask"]:
        """Return what bounds the importance weights: `correction`, or what it is by default.

        Stale samples of objective decoupled have weights that grow without bound with the distance of two policies:
        by default they are truncated, as verl and TRL do it.
        """
        decoupled = self.max_staleness > 0 and self.objective == "decoupled"
        return self.correction or ("truncate" if decoupled else "none")

    @property
    def scores_batch(self) -> bool:
        """Return whether the trainer scores a batch ahead of the first optimiser step."""
        return needs_old_logprobs(self.minibatches * self.epochs, self.kl_in_reward, self.ratio_to_sampler)
