"""Submit the experiment of the working directory and leave: prints what crossed to which site, and when.

Runs on the login node where the launcher is; the jobs go on.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from hetrl.problem import read_problem
from lab.quick import quick_plan
from launch.life import Manner, begin
from launch.shell import Shell
from launch.verbs.prepare import prepare


def main() -> None:
    """Submit, and print the round trips as JSON."""
    trips: list[dict[str, object]] = []
    spawn = Shell._spawn

    def timed(shell: Shell, words: Sequence[str], argv: Sequence[str], seconds: float, stdin: str | None) -> object:
        start = time.time()
        try:
            return spawn(shell, words, argv, seconds, stdin)
        finally:
            trips.append({"site": shell.site, "program": argv[0], "start": start, "end": time.time()})

    Shell._spawn = timed  # type: ignore[method-assign, assignment]
    config, console = Path("config.yaml"), Console(stderr=True)
    prepared = prepare(read_problem(config), quick_plan(), config, "slurm", console)
    code = begin(prepared, quick_plan(), console, Manner(yes=True, detach=True))
    print(json.dumps({"code": code, "trips": trips}))


if __name__ == "__main__":
    main()
