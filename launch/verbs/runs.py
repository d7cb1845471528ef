"""The verbs about a run that exists: `hetrl status`, `hetrl cancel`."""

from __future__ import annotations

import argparse
import json
import sys
import time

from hetrl.files import EventLog
from launch.collect import Collector
from launch.local import carrying, processes_of, stop_processes
from launch.run_directory import Run, find_run, lead_site_of
from launch.show import columns, from_here, refused_line
from launch.slurm.run import read_slurm_run
from launch.slurm.watch import cancel_jobs, job_rows, living_jobs, refresh
from launch.state import State

LAUNCHER_SECONDS = 20.0  # how long `cancel` waits for a launcher that follows the run to end


def status_command(arguments: argparse.Namespace) -> int:
    """Print where a run stands."""
    run = find_run(arguments.run)
    slurm = read_slurm_run(run)
    state = current_state(run) if slurm is None else refresh(run, slurm, "status")
    if arguments.json:
        print(json.dumps(state.to_json(), indent=2))
    else:
        print(columns(status_rows(run, state, living=len(processes_of(state.processes)))))
    if slurm is not None and state.ended and living_jobs(state):
        print(f"the run has ended, and jobs of it live on; `hetrl cancel {run.id}` ends them", file=sys.stderr)
    return 0


def current_state(run: Run) -> State:
    """Collect what there is and return the run's state."""
    collector = Collector(run, lead_site_of(run))
    collector.collect()
    return collector.state


def status_rows(run: Run, state: State, living: int) -> list[tuple[str, str]]:
    """Return what `status` shows as (name, value) rows."""
    rows = [("run", run.id), ("phase", state.phase), ("step", f"{state.step}/{state.steps}")]
    if state.reward is not None:
        rows.append(("reward", f"{state.reward:.3f}"))
    if not state.ended:
        rows += [("member", f"{member} {what}") for member, what in sorted(state.members.items())]
    if state.links_out:
        rows.append(("links out", ", ".join(state.links_out)))
    if state.refused:
        rows.append(("refused", refused_line(state.refused)))
    rows += job_rows(state)
    if state.processes:
        rows.append(("processes", f"{living} of {len(state.processes)} live"))
    if state.cause:
        first, *others = state.cause.splitlines()
        rows += [("cause", first), *(("", line) for line in others)]
    if not state.ended and state.processes and not living:
        rows.append(("note", "its processes are gone without a last word; read `hetrl logs`"))
    if state.updated is not None:
        rows.append(("updated", time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(state.updated))))
    rows.append(("directory", from_here(run.path)))
    return rows


def cancel_command(arguments: argparse.Namespace) -> int:
    """End a run: every process or job of it, from whichever terminal it was started."""
    run = find_run(arguments.run)
    if (slurm := read_slurm_run(run)) is not None:
        print(cancel_jobs(run, slurm))
        return 0
    state = current_state(run)
    living = processes_of(state.processes)
    if state.ended and not living and not carrying(run):
        print(f"{run.id} is {state.phase} already; nothing runs")
        return 0
    if not state.ended:
        EventLog(run.events, "cancel").append("cancelled", cause="cancelled with hetrl cancel")
    stopped = stop_processes(run, living)
    deadline = time.monotonic() + LAUNCHER_SECONDS
    while processes_of([state.launcher] if state.launcher else []) and time.monotonic() < deadline:
        time.sleep(0.1)
    # What the launcher started before it saw the end, as a gateway once more.
    stopped += stop_processes(run, processes_of(current_state(run).processes))
    print(f"{run.id} is {current_state(run).phase}; {stopped} process{'' if stopped == 1 else 'es'} stopped")
    return 0
