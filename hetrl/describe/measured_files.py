"""The files of `topology/measured`: which of them are read, and by what their format says."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from hetrl.describe import measured, measured_links as links
from hetrl.describe.measured import Measured
from hetrl.describe.measured_links import MeasuredLinks
from hetrl.errors import UsageError
from hetrl.files import read_json
from hetrl.gpus import gpu_type

FRESH = timedelta(days=7)  # older files are flagged where they are used
_KINDS: dict[str, tuple[type[Measured] | type[MeasuredLinks], str]] = {
    measured.FORMAT: (Measured, "hetrl profile"),
    links.FORMAT: (MeasuredLinks, "hetrl probe"),
}


def parse(document: Any, where: str) -> Measured | MeasuredLinks:
    """Return the value of a parsed file; UsageError names `where` and the key that is wrong."""
    named = _format_of(document)
    if named not in _KINDS:
        known = " or ".join(f'"{name}" (`{command}`)' for name, (_, command) in _KINDS.items())
        raise UsageError(f"{where}: expected the format {known}, found {named or type(document).__name__}")
    kind, command = _KINDS[named]
    try:
        values = {key: value for key, value in document.items() if key != "format"}
        found: Measured | MeasuredLinks = TypeAdapter(kind).validate_python(values)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise UsageError(f"{where}: {key}: {first['msg']}; do not edit it, measure again with `{command}`") from None
    if isinstance(found, Measured):
        gpu_type(found.gpu, f"{where}: ")
    return found


def read_file(path: Path) -> Measured | MeasuredLinks:
    """Read one file; raises UsageError where it cannot be read or is no measured file."""
    return parse(read_json(path), str(path))


def read_all(paths: Iterable[Path]) -> dict[Path, Measured | MeasuredLinks]:
    """Read files, and those of these formats in directories; raises UsageError for a directory without any."""
    found: dict[Path, Measured | MeasuredLinks] = {}
    for path in paths:
        inside = [path]
        if path.is_dir():  # `hetrl discover` writes its inventories there too
            inside = [one for one in sorted(path.glob("*.json")) if _format_of(read_json(one)) in _KINDS]
        if not inside:
            raise UsageError(
                f"{path}: holds no measured file (*.json); `hetrl profile --out {path}/NAME.json` writes one of a "
                "machine, `hetrl probe` one of the links"
            )
        found |= {one: read_file(one) for one in inside}
    return found


def is_stale(measured_at: datetime, now: datetime) -> bool:
    """Return whether a measurement is older than a week."""
    return now - measured_at > FRESH


def _format_of(document: Any) -> str | None:
    named = document.get("format") if isinstance(document, dict) else None
    return named if isinstance(named, str) else None
