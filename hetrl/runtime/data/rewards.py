"""Rewards by rule: a response is right, wrong, or cannot be scored, and the last is never taken for wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from hetrl.describe.experiment import Data, Reward
from hetrl.runtime.data.math_scorer import MathScorer
from hetrl.runtime.data.verdicts import RIGHT, WRONG, Score, Scorer, Verdict


def exact_match(response: str, answer: str) -> float:
    """Return 1.0 if the response is the answer, spaces around it aside, else 0.0."""
    return float(response.strip() == answer.strip())


class ExactScorer:
    """Accepts the answer itself, spaces around it aside."""

    async def score(self, response: str, answer: str) -> Score:
        """Return RIGHT or WRONG: every text can be compared."""
        return RIGHT if exact_match(response, answer) else WRONG


def rule_of(reward: Reward, data: Data) -> str:
    """Return `exact` or `math`: what `reward.rule` says, else math for gsm8k and math, exact for the other kinds."""
    if reward.rule != "auto":
        return reward.rule
    return "math" if data.kind in ("gsm8k", "math") else "exact"


@asynccontextmanager
async def open_scorer(reward: Reward, data: Data) -> AsyncIterator[Scorer]:
    """Open the scorer of an experiment; on the way out its worker processes are gone.

    Raises HetrlError when a worker cannot start (math-verify is not installed).
    """
    if rule_of(reward, data) == "exact":
        yield ExactScorer()
        return
    async with MathScorer(reward.workers, reward.deadline_seconds) as scorer:
        yield scorer


def reward_of(score: Score, reward: Reward) -> float:
    """Return 1 for a right response, 0 for a wrong one, and `reward.unscorable` for one that cannot be scored."""
    return {Verdict.RIGHT: 1.0, Verdict.WRONG: 0.0, Verdict.UNSCORABLE: reward.unscorable}[score.verdict]


def tally(scores: Sequence[Score]) -> dict[str, object]:
    """Return the counts of right, wrong and unscorable, and of the causes of the last, as metrics show them."""
    verdicts = Counter(score.verdict for score in scores)
    causes = Counter(score.cause for score in scores if score.verdict is Verdict.UNSCORABLE)
    return {**{verdict.value: verdicts[verdict] for verdict in Verdict}, "unscorable_causes": dict(causes)}
