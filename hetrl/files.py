"""Files that readers see either as they were or as a whole, and files that only their owner reads."""

from __future__ import annotations

import json
import os
from pathlib import Path

from hetrl.errors import HetrlError


def replace_text(path: Path, text: str) -> None:
    """Write a file in one go: whoever reads it, or writes it at the same time, never meets a part."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def replace_json(path: Path, document: object) -> None:
    """Write a JSON file in one go, for people to read as well."""
    replace_text(path, json.dumps(document, indent=2) + "\n")


def write_private(path: Path | str, text: str, what: str) -> None:
    """Write a file of mode 0600 that was not there; `what` is what errors call it.

    Raises HetrlError where it exists already or cannot be written.
    """
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError as error:
        raise HetrlError(f"{path}: the {what} exists already; it is never written over, remove it first") from error
    except OSError as error:
        raise HetrlError(f"{path}: cannot write the {what} ({error.strerror})") from error
    with os.fdopen(descriptor, "w") as file:
        file.write(text)


def read_private(path: Path | str, what: str) -> str:
    """Return the text of a file that nobody but its owner may read; `what` is what errors call it.

    Raises HetrlError where others may, or where it cannot be read.
    """
    try:
        with Path(path).open() as file:
            mode = os.fstat(file.fileno()).st_mode
            if mode & 0o077:
                raise HetrlError(
                    f"{path}: others can read this {what} (mode {mode & 0o777:03o}); chmod 600 {path}, "
                    "and make another one if they may have read it"
                )
            return file.read()
    except OSError as error:
        raise HetrlError(f"{path}: cannot read the {what} ({error.strerror})") from error
    except UnicodeDecodeError:
        raise HetrlError(f"{path}: not a {what}") from None
