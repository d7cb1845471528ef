"""What is run on a login node while a site measures, one bash script per round trip, and what its answers mean. Pure.

Nobody asks Slurm how a task is: each leaves its exit code in a file when it has ended.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import hetrl
from hetrl.runtime.instruments.probe import LINKS_FILE, READY_FILE
from hetrl.runtime.instruments.probe_nodes import NODES_FILE
from launch.measure.remote_task import ENDED, JOBS_FILE, LOCAL, LOGS, TASKS_FILE
from launch.measure.stage import GPU, ProbeSite
from launch.remote import Part, parse, script

LOG_LINES = 40
END_SECONDS = 5  # that a process of this machine has to end


def start_script(site: ProbeSite) -> str:
    """Start the tasks, and print their jobs.

    Where jobs run in a container, the login node's own python3 starts them: sbatch is outside.
    """
    setup, code = site.file.setup_lines, f"{site.there}/code"
    python = site.file.python if site.file.container is None else "python3"
    if site.executor == LOCAL:
        setup, code, python = (), str(Path(hetrl.__file__).resolve().parent.parent), sys.executable
    return script("probe_start", directory=site.there, python=python, code=code, tasks=TASKS_FILE, setup=setup)


@dataclass(frozen=True)
class Look:
    """How far a site is: where its gateway listens (None: not yet), and the exit codes of the tasks that ended."""

    endpoint: str | None = None
    ended: Mapping[str, int] = field(default_factory=dict)


def look_script(site: ProbeSite) -> str:
    """Say how far a site is."""
    return script("probe_look", directory=site.there, ready=READY_FILE, ended=ENDED)


def parse_look(text: str) -> Look:
    """Read what `look_script` printed."""
    parts = parse(text)
    pairs = (line.split() for line in parts.get("ended", Part()).text.splitlines())
    ended = {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2}
    return Look(parts.get("ready", Part()).text.strip() or None, ended)


def write_script(site: ProbeSite, files: Mapping[str, str]) -> str:
    """Write small files into a site's directory, in this order, each in one go."""
    return script("write_files", directory=site.there, files=[word for file in files.items() for word in file])


def fetch_script(site: ProbeSite) -> str:
    """Print what was measured, and the last lines of every log."""
    files = (LINKS_FILE, NODES_FILE)
    return script("probe_fetch", directory=site.there, files=files, gpu=GPU, logs=LOGS, log_lines=LOG_LINES)


def parse_fetched(text: str) -> dict[str, str]:
    """Return the files that `fetch_script` printed, by name."""
    output = "output "
    parts = ((name.removeprefix(output), part) for name, part in parse(text).items() if name.startswith(output))
    return {name: part.text for name, part in parts if part.code == 0}


def stop_script(site: ProbeSite) -> str:
    """End all tasks of a site of the local executor."""
    return script("probe_stop", directory=site.there, jobs=JOBS_FILE, end_seconds=END_SECONDS)
