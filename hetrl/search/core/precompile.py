"""Compile the search before anyone waits for a plan: `python -m hetrl.search.core.precompile`."""

from __future__ import annotations

import sys

from hetrl.errors import HetrlError
from hetrl.search.core.functions import library


def main() -> None:
    """Compile what is not compiled yet."""
    try:
        library()
    except HetrlError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
