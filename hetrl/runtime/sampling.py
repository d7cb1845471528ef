"""From prompts to scored samples: dispatch to the generation replicas, check versions, apply the reward rule."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from tokenizers import Tokenizer

from hetrl.errors import HetrlError
from hetrl.runtime import wire
from hetrl.runtime.data import Prompt
from hetrl.runtime.layout import split
from hetrl.runtime.member import Member
from hetrl.runtime.rewards import exact_match

GENERATE_SECONDS = 3600.0


@dataclass(frozen=True)
class Group:
    """The samples of one prompt and their rewards."""

    prompt: Prompt
    prompt_tokens: tuple[int, ...]
    samples: tuple[wire.Sample, ...]
    rewards: tuple[float, ...]


@dataclass(frozen=True)
class Sampler:
    """Draws groups of samples; `shares` are the samples per replica of the plan, in the replicas' order."""

    member: Member
    replicas: tuple[str, ...]
    shares: tuple[int, ...]
    tokenizer: Tokenizer
    stop_token: int
    samples_per_prompt: int
    prompt_tokens: int
    response_tokens: int
    temperature: float
    seed: int

    async def draw(self, prompts: Sequence[Prompt], stream: str, version: int) -> tuple[Group, ...]:
        """Sample every prompt; prompts go to replicas in proportion to their shares, always in the same way.

        `stream` names the draw: the same experiment seed and stream give the same random numbers. Raises HetrlError
        when a token was not drawn under `version`.
        """
        parts = split(len(prompts), self.shares)
        receivers = [name for name, part in zip(self.replicas, parts, strict=True) for _ in part]
        return tuple(
            await asyncio.gather(
                *(
                    self._group(number, prompt, receiver, stream, version)
                    for number, (prompt, receiver) in enumerate(zip(prompts, receivers, strict=True))
                )
            )
        )

    async def _group(self, number: int, prompt: Prompt, receiver: str, stream: str, version: int) -> Group:
        tokens = tuple(self.tokenizer.encode(prompt.text, add_special_tokens=False).ids)
        if len(tokens) > self.prompt_tokens:
            raise HetrlError(
                f'the prompt "{prompt.text[:40]}" has {len(tokens)} tokens; batch.prompt_tokens is {self.prompt_tokens}'
            )
        sampling = wire.Sampling(
            samples=self.samples_per_prompt,
            max_tokens=self.response_tokens,
            temperature=self.temperature,
            top_p=1.0,
            seed=seed_of(self.seed, stream, number),
            stop_token=self.stop_token,
        )
        request = wire.Generate(group=number, prompt=tokens, sampling=sampling)
        doing = f"{stream}: generate group {number}"
        reply = await self.member.request(receiver, request, timeout_seconds=GENERATE_SECONDS, doing=doing)
        if not isinstance(reply.message, wire.Generated):
            raise HetrlError(f"{receiver}: answered {type(reply.message).__name__} ({doing})")
        samples = reply.message.samples
        _check_versions(samples, version, receiver, doing)
        return Group(prompt, tokens, samples, tuple(self._reward(prompt, sample) for sample in samples))

    def _reward(self, prompt: Prompt, sample: wire.Sample) -> float:
        return exact_match(self.tokenizer.decode(list(sample.tokens), skip_special_tokens=True), prompt.answer)


def _check_versions(samples: Sequence[wire.Sample], version: int, receiver: str, doing: str) -> None:
    drawn = {span.version for sample in samples for span in sample.versions}
    if drawn != {version}:
        raise HetrlError(f"{receiver}: drew tokens under weight versions {sorted(drawn)}, not {version} ({doing})")


def seed_of(seed: int, stream: str, number: int) -> int:
    """Return a 31-bit seed that depends on all three."""
    digest = hashlib.blake2b(f"{seed}:{stream}:{number}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") & 0x7FFFFFFF


def mean_reward(groups: Sequence[Group]) -> float:
    """Return the mean over all samples."""
    return float(np.mean([reward for group in groups for reward in group.rewards]))
