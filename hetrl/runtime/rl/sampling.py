"""From prompts to scored samples: let the generation replicas draw them, apply the reward rule."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

import numpy as np
from tokenizers import Tokenizer

from hetrl.describe.experiment import Reward
from hetrl.errors import HetrlError
from hetrl.runtime import wire
from hetrl.runtime.data.chat import Encoder
from hetrl.runtime.data.prompts import Prompt
from hetrl.runtime.data.rewards import Judgement, Scorer, overlong_penalty, reward_of
from hetrl.runtime.rl.draws import Draws
from hetrl.runtime.rl.stretches import Request, Stretch
from hetrl.runtime.rl.turns import Turns


@dataclass(frozen=True)
class PromptGroup:
    """The samples of one prompt, their judgements and rewards, and the stretches in which each was drawn.

    `rewards` are what is trained on, without the reward model's part until it has said its `model_scores`;
    `rule_rewards` are what the rule alone says.
    """

    prompt: Prompt
    prompt_tokens: tuple[int, ...]
    samples: tuple[wire.Sample, ...]
    rewards: tuple[float, ...]
    judgements: tuple[Judgement, ...] = ()
    rule_rewards: tuple[float, ...] = ()
    model_scores: tuple[float, ...] = ()
    stretches: tuple[tuple[Stretch, ...], ...] = ()

    @property
    def sent(self) -> float:
        """Return when the prompt went to a replica for the first time."""
        return min(one.sent for one in chain(*self.stretches))

    @property
    def back(self) -> float:
        """Return when its last sample was here."""
        return max(one.back for one in chain(*self.stretches))


@dataclass(frozen=True, kw_only=True)
class SamplingSettings:
    """How prompts are encoded, sampled and judged; tokens are counted as the model's tokenizer does."""

    encode: Encoder
    tokenizer: Tokenizer
    scorer: Scorer
    reward: Reward
    stop_tokens: tuple[int, ...]
    batch_prompts: int
    samples_per_prompt: int
    prompt_tokens: int
    response_tokens: int
    temperature: float
    seed: int


class Sampler:
    """Draws groups of samples from the generation replicas and judges them."""

    def __init__(self, draws: Draws, turns: Turns, settings: SamplingSettings) -> None:
        self._draws, self._turns, self._settings = draws, turns, settings

    async def draw(self, prompts: Sequence[Prompt], stream: str) -> tuple[PromptGroup, ...]:
        """Sample a group for every prompt, all at once."""
        return tuple(await asyncio.gather(*(self.group(prompt, n, stream) for n, prompt in enumerate(prompts))))

    async def group(self, prompt: Prompt, number: int, stream: str, kept: Sequence[wire.Sample] = ()) -> PromptGroup:
        """Sample one prompt and reward its samples, which go on behind those that were `kept`.

        `stream` and `number` name the random numbers, together with the experiment's seed; which replicas draw them
        does not matter.
        """
        try:
            return await self._group(prompt, number, stream, kept)
        finally:
            self._draws.forget(number)

    async def _group(self, prompt: Prompt, number: int, stream: str, kept: Sequence[wire.Sample]) -> PromptGroup:
        settings, tokens = self._settings, self._settings.encode(prompt)
        if len(tokens) > settings.prompt_tokens:
            raise HetrlError(
                f'the prompt "{prompt.text[:40]}" has {len(tokens)} tokens; '
                f"batch.prompt_tokens is {settings.prompt_tokens}"
            )
        requests = [self._request(tokens, stream, number, sample) for sample in range(settings.samples_per_prompt)]
        if kept:
            requests = [replace(request, have=have) for request, have in zip(requests, kept, strict=True)]
        async with self._turns.prompt():
            drawn = await self._draws.group(requests, number // settings.batch_prompts, number)
        samples = tuple(one.sample for one in drawn)
        judgements = tuple(await asyncio.gather(*(self._judge(prompt, sample) for sample in samples)))
        ruled = tuple(reward_of(judgement, settings.reward) for judgement in judgements)
        rewards = tuple(
            settings.reward.rule_share * rule
            - overlong_penalty(len(sample.tokens), settings.response_tokens, settings.reward.overlong)
            for rule, sample in zip(ruled, samples, strict=True)
        )
        return PromptGroup(
            prompt=prompt,
            prompt_tokens=tokens,
            samples=samples,
            rewards=rewards,
            judgements=judgements,
            rule_rewards=ruled,
            stretches=tuple(one.stretches for one in drawn),
        )

    def _request(self, prompt: tuple[int, ...], stream: str, number: int, sample: int) -> Request:
        settings = self._settings
        return Request(
            prompt=prompt,
            max_tokens=settings.response_tokens,
            temperature=settings.temperature,
            stop_tokens=settings.stop_tokens,
            seed=partial(seed_of, settings.seed, stream, number, sample),
            doing=f"{stream}: sample {sample} of prompt {number}",
        )

    async def _judge(self, prompt: Prompt, sample: wire.Sample) -> Judgement:
        text = self._settings.tokenizer.decode(list(sample.tokens), skip_special_tokens=True)
        return await self._settings.scorer.score(text, prompt.answer)


def seed_of(*parts: int | str) -> int:
    """Return a 31-bit seed that depends on all parts."""
    digest = hashlib.blake2b(":".join(map(str, parts)).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") & 0x7FFFFFFF


def mean_of(values: Iterable[Sequence[float]]) -> float:
    """Return the mean over all samples of what groups have of each, such as their rewards."""
    return float(np.mean([*chain(*values)]))
