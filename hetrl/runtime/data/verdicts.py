"""What a rule says of a response: right, wrong, or unscorable with its cause."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Protocol


class Verdict(Enum):
    """What a rule says of a response."""

    RIGHT = "right"
    WRONG = "wrong"
    UNSCORABLE = "unscorable"


@dataclass(frozen=True)
class Score:
    """A verdict; `cause` says why a response could not be scored, and is empty otherwise."""

    verdict: Verdict
    cause: str = ""


RIGHT, WRONG = Score(Verdict.RIGHT), Score(Verdict.WRONG)


def unscorable(cause: str) -> Score:
    """Return the score of a response that could not be scored."""
    return Score(Verdict.UNSCORABLE, cause)


class Scorer(Protocol):
    """Compares a response with the accepted answer; many calls may be under way at once."""

    async def score(self, response: str, answer: str) -> Score:
        """Return the score of a response."""
        ...
