"""Text of others, made fit for a log and a terminal."""

from __future__ import annotations

MOST_CHARACTERS, MOST_LINES = 500, 100


def printable(text: str, most: int = MOST_CHARACTERS) -> str:
    """Return at most so many characters on one line: what a terminal would obey, or not show, is written as escapes."""
    shown = "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text[:most])
    return shown if len(text) <= most else f"{shown} [{len(text) - most} characters more]"


def printable_lines(text: str) -> str:
    """Return the first lines of a text, each as `printable` has it."""
    first, *others = text.split("\n", MOST_LINES)
    return "\n".join(map(printable, (first, *others)))
