"""Files that readers see either as they were or as a whole."""

from __future__ import annotations

import json
import os
from pathlib import Path


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
