"""Say which of the measured files are old."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from hetrl.describe.measured import Measured
from hetrl.describe.measured_files import is_stale
from hetrl.describe.measured_links import MeasuredLinks
from launch.show import from_here


def warn_of_stale(files: Mapping[Path, Measured | MeasuredLinks]) -> None:
    """Warn of files older than a week."""
    now = datetime.now(UTC)
    for path, one in files.items():
        if is_stale(one.measured_at, now):
            command = "hetrl probe" if isinstance(one, MeasuredLinks) else "hetrl profile"
            date = f"{one.measured_at:%Y-%m-%d}"
            print(f"warning: {from_here(path)} is of {date}; measure again with `{command}`", file=sys.stderr)
