"""What the sampler makes of replicas' answers."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from hetrl.describe.experiment import Overlong, Reward
from hetrl.dispatch import Capacity, Dispatch
from hetrl.runtime import wire
from hetrl.runtime.data.prompts import Prompt
from hetrl.runtime.data.rewards import ExactScorer
from hetrl.runtime.rl.draws import Draws
from hetrl.runtime.rl.sampling import PromptGroup, Sampler, SamplingSettings
from hetrl.runtime.rl.timeline import Timeline
from hetrl.runtime.rl.turns import Turns
from hetrl.runtime.run.record import sample_metrics
from hetrl.runtime.transport.member import Member

LONGEST = 10


class Replica:
    """Answers with responses of these lengths, all of the token 1, the longest of them cut off."""

    def __init__(self, *lengths: int) -> None:
        self.lengths = iter(lengths)

    async def request(self, to: str, message: wire.Generate, **_: Any) -> Any:
        length = next(self.lengths)
        sample = wire.Sample(
            tokens=(1,) * length,
            logprobs=(-0.5,) * length,
            versions=(wire.VersionSpan(version=1, start=0, end=length),),
            finish_reason="length" if length == LONGEST else "stop",
        )
        return SimpleNamespace(message=wire.Generated(samples=(sample,), seconds=0.0))


def drawn(reward: Reward) -> PromptGroup:
    member = cast(Member, Replica(1, 6, 8, LONGEST))
    settings = SamplingSettings(
        encode=lambda prompt: (0,),
        tokenizer=Tokenizer(WordLevel({"w0": 0, "w1": 1}, unk_token="w0")),
        scorer=ExactScorer(),
        reward=reward,
        stop_tokens=(),
        batch_prompts=1,
        samples_per_prompt=4,
        prompt_tokens=1,
        response_tokens=LONGEST,
        temperature=1.0,
        seed=0,
    )
    dispatch = Dispatch({"a/actor_generation/0": Capacity(4, 4)}, LONGEST, LONGEST)
    draws = Draws(member, dispatch, lambda name, error: None, Timeline())
    sampler = Sampler(draws, Turns(member, (), new_weights=True), settings)
    return asyncio.run(sampler.group(Prompt("q", "w1"), 0, "train"))


def test_rewards_are_those_of_the_rule_less_what_a_response_loses_for_its_length() -> None:
    assert drawn(Reward()).rewards == (1.0, 0.0, 0.0, 0.0)
    overlong = Overlong(buffer_tokens=4, penalty=2.0)
    assert drawn(Reward(overlong=overlong)).rewards == (1.0, 0.0, -1.0, -2.0)


def test_what_was_cut_off_is_counted() -> None:
    assert sample_metrics([drawn(Reward())])["truncated"] == 1
