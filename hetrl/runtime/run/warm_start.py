"""The supervised start of a run whose model is drawn from a seed."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from hetrl.describe.experiment import WarmStart
from hetrl.errors import HetrlError


async def warm_start(
    settings: WarmStart, check: Callable[[int], Awaitable[float]], imitate: Callable[[int], Awaitable[None]]
) -> None:
    """Train on generated demonstrations until the sampled reward is where RL should begin.

    `check(done)` returns the reward after so many steps, `imitate(done)` takes the next `steps_per_check` and lets
    sampling have the weights. RL needs a model that is sometimes right; a model drawn from a seed never is. Raises
    HetrlError when the reward jumps over the range or never gets there.
    """
    low, high = settings.reward
    for done in range(0, settings.max_steps + 1, settings.steps_per_check):
        reward = await check(done)
        if reward > high:
            raise HetrlError(
                f"warm start: sampled reward {reward:.2f} after {done} supervised steps is above {high}; "
                "lower warm_start.learning_rate or steps_per_check"
            )
        if reward >= low:
            return
        await imitate(done)
    raise HetrlError(
        f"warm start: sampled reward below {low} after {settings.max_steps} supervised steps; "
        "raise warm_start.learning_rate or max_steps"
    )
