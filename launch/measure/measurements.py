"""Put what machines measured before what is published, and say where it is old."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from hetrl.cost.efficiency import prefer
from hetrl.describe.measured import Measured, merge
from hetrl.describe.measured_files import is_stale
from hetrl.describe.measured_links import MeasuredLinks
from launch.show import from_here


def put_in_force(files: Mapping[Path, Measured | MeasuredLinks]) -> None:
    """Predict with the shares of these files from here on, and with no others; warns of files older than a week."""
    now = datetime.now(UTC)
    for path, one in files.items():
        if is_stale(one.measured_at, now):
            command = "hetrl probe" if isinstance(one, MeasuredLinks) else "hetrl profile"
            date = f"{one.measured_at:%Y-%m-%d}"
            print(f"warning: {from_here(path)} is of {date}; measure again with `{command}`", file=sys.stderr)
    prefer(merge(one for one in files.values() if isinstance(one, Measured)))
