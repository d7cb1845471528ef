"""Supervised steps on generated demonstrations, until the sampled reward is where RL should begin.

RL needs a model that is sometimes right; a model drawn from a seed never is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hetrl.errors import HetrlError
from hetrl.experiment import WarmStart
from hetrl.runtime.experience import padded
from hetrl.runtime.sampling import mean_reward

if TYPE_CHECKING:
    from hetrl.runtime.controller import Run

PROMPTS = 64  # of each check


async def warm_start(run: Run, settings: WarmStart) -> None:
    """Train until the reward lies in the range; raises HetrlError when it jumps over the range or never gets there."""
    low, high = settings.reward
    for done in range(0, settings.max_steps + 1, settings.steps_per_check):
        prompts = [run.source(done * PROMPTS + number) for number in range(PROMPTS)]
        reward = mean_reward(await run.sampler.draw(prompts, f"warm start {done}"))
        run.record.warm_start(done, reward)
        if reward > high:
            raise HetrlError(
                f"warm start: sampled reward {reward:.2f} after {done} supervised steps is above {high}; "
                "lower warm_start.learning_rate or steps_per_check"
            )
        if reward >= low:
            return
        for step in range(done, done + settings.steps_per_check):
            await _supervised_step(run, settings, step)
        await run.publish()
    raise HetrlError(
        f"warm start: sampled reward below {low} after {settings.max_steps} supervised steps; "
        "raise warm_start.learning_rate or max_steps"
    )


async def _supervised_step(run: Run, settings: WarmStart, step: int) -> None:
    """Imitate the answers of a batch of prompts."""
    demonstrations = [run.source(step * settings.samples + number) for number in range(settings.samples)]
    sequences = [(run.encode(d), (*_answer_tokens(run, d.answer), run.stop_tokens[0])) for d in demonstrations]
    arrays = padded(sequences, run.pad_token)
    await run.policy.train(arrays, "supervised", {"learning_rate": settings.learning_rate}, step)


def _answer_tokens(run: Run, answer: str) -> tuple[int, ...]:
    return tuple(run.tokenizer.encode(answer, add_special_tokens=False).ids)
