"""Answers of sites for tests."""

from __future__ import annotations


def part(name: str, text: str = "", code: int = 0) -> str:
    """A part of an answer, as launch/remote/prelude.sh prints it."""
    return f"@ {name}\n{text}@ end {code}\n"
