"""The command line's arguments: their types, which raise argparse.ArgumentTypeError, and files to be written."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from hetrl.errors import HetrlError


def positive(text: str) -> float:
    """Return a number above 0."""
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


def share(text: str) -> float:
    """Return a number of 0 or more, below 1."""
    value = float(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a share: 0 or more, below 1")
    return value


def count(text: str) -> int:
    """Return a whole number of 0 or more."""
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is negative")
    return value


def at_least_one(text: str) -> int:
    """Return a whole number of 1 or more."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return value


def check_writable(path: Path, what: str) -> None:
    """Raise HetrlError for what is known before any work: a directory, one that is not there, no permission."""
    place, cause = path if path.exists() else path.absolute().parent, ""
    if path.is_dir():
        cause = "Is a directory"
    elif not place.exists():
        cause = f"there is no directory {place}"
    elif not os.access(place, os.W_OK):
        cause = "Permission denied"
    if cause:
        raise HetrlError(f"{path}: cannot write the {what} ({cause})")
