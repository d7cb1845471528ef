"""What is run on a login node while a site measures, one bash script per round trip, and what its answers mean. Pure.

Nobody asks Slurm how a task is: each leaves its exit code in a file when it has ended.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

import hetrl
from hetrl.runtime.instruments.probe import LINKS_FILE, READY_FILE
from hetrl.runtime.instruments.probe_nodes import NODES_FILE
from launch.measure.probe_stage import GPU, LOCAL, ProbeSite
from launch.measure.remote_task import ENDED, JOBS_FILE, LOGS, TASKS_FILE
from launch.slurm.commands import ASK_SECONDS, parts_of

LOG_LINES = 40
END_SECONDS = 5  # that a process of this machine has to end
_OUTPUT = "@ output "  # begins a part that is a file as a whole


def start_script(site: ProbeSite) -> str:
    """Start the tasks, and print their jobs. What is started keeps no hold of this script's output.

    Where jobs run in a container, the login node's own python3 starts them: sbatch is outside.
    """
    modules = [f"module load {shlex.quote(module)}" for module in site.file.modules]
    code, python = f"{site.there}/code", site.file.python if site.file.container is None else "python3"
    if site.executor == LOCAL:
        modules, code, python = [], str(Path(hetrl.__file__).resolve().parent.parent), sys.executable
    return "\n".join(
        [
            f"cd {shlex.quote(site.there)} || exit",
            *modules,
            f"export PYTHONPATH={shlex.quote(code)} PYTHONUNBUFFERED=1",
            f"{shlex.quote(python)} -m launch.cli remote-task {TASKS_FILE} >started 2>start.log </dev/null",
            "code=$?",
            "cat started; cat start.log >&2",
            "exit $code\n",
        ]
    )


@dataclass(frozen=True)
class Look:
    """How far a site is: where its gateway listens (None: not yet), and the exit codes of the tasks that ended."""

    endpoint: str | None = None
    ended: Mapping[str, int] = field(default_factory=dict)


def look_script(site: ProbeSite) -> str:
    """Say how far a site is."""
    return f"""\
cd {shlex.quote(site.there)} || {{ echo '@ absent'; exit; }}
echo '@ ready'; cat {READY_FILE} 2>/dev/null
echo '@ ended'; for file in {ENDED}/*; do [ -s "$file" ] && echo "${{file#{ENDED}/}} $(cat "$file")"; done
exit 0
"""


def parse_look(text: str) -> Look:
    """Read what `look_script` printed."""
    parts = parts_of(text)
    pairs = (line.split() for line in parts.get("ended", "").splitlines())
    ended = {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2}
    return Look(parts.get("ready", "").strip() or None, ended)


def write_script(site: ProbeSite, files: Mapping[str, str]) -> str:
    """Write small files into a site's directory, in this order, each in one go."""
    lines = [f"cd {shlex.quote(site.there)} && mkdir -p peers || exit"]
    for name, text in files.items():
        place = shlex.quote(name)
        lines.append(f"printf %s {shlex.quote(text)} >.partial && mv .partial {place} || exit")
    return "\n".join(lines) + "\n"


def fetch_script(site: ProbeSite) -> str:
    """Print what was measured, and the last lines of every log."""
    return f"""\
cd {shlex.quote(site.there)} || {{ echo '@ absent'; exit; }}
for file in {LINKS_FILE} {NODES_FILE} {GPU}*.json; do
  if [ -s "$file" ]; then echo "{_OUTPUT}$file"; cat "$file"; echo; fi
done
for file in {LOGS}/*.log; do
  if [ -s "$file" ]; then echo "{_OUTPUT}$file"; tail -n {LOG_LINES} "$file" | sed 's/^@ / @ /'; fi
done
exit 0
"""


def parse_fetched(text: str) -> dict[str, str]:
    """Return the files that `fetch_script` printed, by name."""
    output = _OUTPUT.removeprefix("@ ")
    return {head.removeprefix(output): body for head, body in parts_of(text).items() if head.startswith(output)}


def stop_script(site: ProbeSite) -> str:
    """End all tasks, those that still wait too, and remove what lies at a Slurm site."""
    if site.executor == LOCAL:
        end = f"""\
  kill -INT "$id" 2>/dev/null  # submitit's way to cancel
  for ((i = 0; i < {10 * END_SECONDS}; i++)); do kill -0 "$id" 2>/dev/null && sleep 0.1; done
  kill -KILL "$id" 2>/dev/null"""
        removal = "true"
    else:
        cluster = f" --clusters={site.file.cluster}" if site.file.cluster else ""
        end = f'  timeout {ASK_SECONDS} scancel{cluster} "$id" </dev/null || echo "@ left $name $id"'
        own, of_run = (shlex.quote(str(path)) for path in (site.there, PurePosixPath(site.there).parent))
        removal = f"cd / && rm -rf -- {own}; rmdir -- {of_run} 2>/dev/null"
    return f"""\
cd {shlex.quote(site.there)} 2>/dev/null || exit 0
if [ -e {JOBS_FILE} ]; then while read -r name id; do
{end}
done <{JOBS_FILE}; fi
{removal}
exit 0
"""
