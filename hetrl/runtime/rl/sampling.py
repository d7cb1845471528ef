"""From prompts to scored samples: dispatch to the generation replicas, apply the reward rule."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from tokenizers import Tokenizer

from hetrl.describe.experiment import Reward
from hetrl.errors import HetrlError
from hetrl.runtime import wire
from hetrl.runtime.data.chat import Encoder
from hetrl.runtime.data.prompts import Prompt
from hetrl.runtime.data.rewards import Judgement, Scorer, overlong_penalty, reward_of
from hetrl.runtime.rl.turns import Turns
from hetrl.runtime.transport.member import Member


@dataclass(frozen=True)
class PromptGroup:
    """The samples of one prompt, their judgements and rewards, and the replica that drew them in so many seconds.

    `rewards` are what is trained on, without the reward model's part until it has said its `model_scores`;
    `rule_rewards` are what the rule alone says.
    `sent` and `back` are when the prompt went to the replica and its samples were here, on this process's clock.
    """

    prompt: Prompt
    prompt_tokens: tuple[int, ...]
    samples: tuple[wire.Sample, ...]
    rewards: tuple[float, ...]
    judgements: tuple[Judgement, ...] = ()
    rule_rewards: tuple[float, ...] = ()
    model_scores: tuple[float, ...] = ()
    replica: str = ""
    seconds: float = 0.0
    sent: float = 0.0
    back: float = 0.0


@dataclass(frozen=True, kw_only=True)
class SamplingSettings:
    """How prompts are encoded, sampled and judged; tokens are counted as the model's tokenizer does."""

    encode: Encoder
    tokenizer: Tokenizer
    scorer: Scorer
    reward: Reward
    stop_tokens: tuple[int, ...]
    samples_per_prompt: int
    prompt_tokens: int
    response_tokens: int
    temperature: float
    seed: int


class Sampler:
    """Draws groups of samples from the generation replicas, each in proportion to its share of the plan."""

    def __init__(self, member: Member, turns: Turns, shares: Mapping[str, int], settings: SamplingSettings) -> None:
        """Draw from the replicas that `shares` names, with the samples per iteration that the plan gives each."""
        self._member, self._turns, self._shares, self._settings = member, turns, shares, settings
        self._outstanding = dict.fromkeys(shares, 0)

    async def draw(self, prompts: Sequence[Prompt], stream: str) -> tuple[PromptGroup, ...]:
        """Sample a group for every prompt, all at once."""
        return tuple(await asyncio.gather(*(self.group(prompt, n, stream) for n, prompt in enumerate(prompts))))

    async def group(self, prompt: Prompt, number: int, stream: str) -> PromptGroup:
        """Sample one prompt and reward its samples.

        `stream` and `number` name the random numbers, together with the experiment's seed; which replica draws them
        does not matter. The replica is the one with the least to do for its share.
        """
        replica = min(self._shares, key=lambda name: (self._outstanding[name] + 1) / self._shares[name])
        self._outstanding[replica] += 1
        try:
            async with self._turns.prompt():
                return await self._ask(replica, prompt, number, stream)
        finally:
            self._outstanding[replica] -= 1

    async def _ask(self, replica: str, prompt: Prompt, number: int, stream: str) -> PromptGroup:
        settings = self._settings
        tokens = settings.encode(prompt)
        if len(tokens) > settings.prompt_tokens:
            raise HetrlError(
                f'the prompt "{prompt.text[:40]}" has {len(tokens)} tokens; '
                f"batch.prompt_tokens is {settings.prompt_tokens}"
            )
        sampling = wire.Sampling(
            samples=settings.samples_per_prompt,
            max_tokens=settings.response_tokens,
            temperature=settings.temperature,
            top_p=1.0,
            seed=seed_of(settings.seed, stream, number),
            stop_tokens=settings.stop_tokens,
        )
        request = wire.Generate(group=number, prompt=tokens, sampling=sampling)
        doing = f"{stream}: generate group {number}"
        sent = time.monotonic()
        reply = await self._member.request(replica, request, timeout_seconds=wire.WORK_SECONDS, doing=doing)
        back = time.monotonic()
        if not isinstance(reply.message, wire.Generated):
            raise HetrlError(f"{replica}: answered {type(reply.message).__name__} ({doing})")
        samples = reply.message.samples
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
            replica=replica,
            seconds=reply.message.seconds,
            sent=sent,
            back=back,
        )

    async def _judge(self, prompt: Prompt, sample: wire.Sample) -> Judgement:
        text = self._settings.tokenizer.decode(list(sample.tokens), skip_special_tokens=True)
        return await self._settings.scorer.score(text, prompt.answer)


def seed_of(seed: int, stream: str, number: int) -> int:
    """Return a 31-bit seed that depends on all three."""
    digest = hashlib.blake2b(f"{seed}:{stream}:{number}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") & 0x7FFFFFFF


def mean_of(values: Iterable[Sequence[float]]) -> float:
    """Return the mean over all samples of what groups have of each, such as their rewards."""
    return float(np.mean([*chain(*values)]))
