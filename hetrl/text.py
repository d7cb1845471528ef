"""Text of others, made fit for a log, a terminal and one line."""

from __future__ import annotations

MOST_CHARACTERS = 500


def printable(text: str, most: int = MOST_CHARACTERS) -> str:
    """Return at most so many characters on one line: what a terminal would obey, or not show, is written as escapes."""
    shown = "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text[:most])
    return shown if len(text) <= most else f"{shown} [{len(text) - most} characters more]"
