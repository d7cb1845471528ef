"""Rule-based rewards."""

from __future__ import annotations


def exact_match(response: str, answer: str) -> float:
    """Return 1.0 if the response is the answer, spaces around it aside, else 0.0."""
    return float(response.strip() == answer.strip())
