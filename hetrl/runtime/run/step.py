"""Run one process of a Slurm step: `srun ... python -m hetrl.runtime.run.step scripts/gang.json actor_training`.

The file lists the processes of each step; task i of a step (SLURM_PROCID) runs the i-th of them:

    print to logs/<process>.log
    take the GPUs that Slurm granted: the file counts them from 0
    execute its command with a temporary directory of its own, wait, and remove that
    say where a signal ended it: the controller of its site names it then
    in an array, where it is a rollout that was killed, or crashed: execute it once more, some times
    where it fails and nobody of the job has before: write `EXIT-CODE PROCESS` to the file HETRL_FAILURE

srun itself returns the highest exit code of all tasks, which is that of one that it ended because another had failed.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from hetrl.errors import HetrlError, UsageError
from hetrl.runtime.parent_death import end_with_parent
from hetrl.runtime.run.deaths import note_end, note_start
from hetrl.runtime.temporary import private_directory, remove_unheld

RESTARTS = 3  # of a rollout: the run does without it
# How a process ends that somebody killed, the system among them, or that crashed; Slurm ends by other signals first.
_CRASHES = {128 + one for one in (signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE)}
_VISIBLE, _FAILURE = "CUDA_VISIBLE_DEVICES", "HETRL_FAILURE"
# Slurm sends these to the whole process group of a task: the process gets them, and says what came of it.
_SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


@dataclass(frozen=True)
class StepProcess:
    """One process: its name within the site, its command, what it adds to the environment.

    CUDA_VISIBLE_DEVICES counts the GPUs that Slurm grants on the node from 0; empty: it is to see none.
    """

    name: str
    argv: tuple[str, ...]
    environment: Mapping[str, str]


@dataclass(frozen=True)
class JobProcesses:
    """The file of a job: its processes by step, or by index of the array."""

    steps: Mapping[str, tuple[StepProcess, ...]]


def read_processes(path: Path) -> JobProcesses:
    """Read the file of a job; raises UsageError where it is not one."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=JobProcesses)
    except OSError as error:
        raise UsageError(f"{path}: cannot read the rows of this job ({error.strerror})") from None
    except msgspec.MsgspecError as error:
        raise UsageError(f"{path}: not the rows of a job ({error}); submit the run again") from None


def process_of(job: JobProcesses, step: str, environment: Mapping[str, str]) -> StepProcess:
    """Return the process of this task of a step; raises UsageError where the step has another number of tasks."""
    if step not in job.steps:
        raise UsageError(f'there is no step "{step}" in the rows of this job; it has {", ".join(job.steps)}')
    found = job.steps[step]
    number, count = int(environment.get("SLURM_PROCID", "0")), int(environment.get("SLURM_NTASKS", "1"))
    if count != len(found) or number >= count:
        raise UsageError(f"step {step} has {len(found)} processes, and srun started {count} tasks; set --ntasks")
    return found[number]


def environment_of(process: StepProcess, inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a process, with the GPUs that Slurm granted.

    Raises UsageError where Slurm granted fewer GPUs than the process counts on.
    """
    environment = {**inherited, **process.environment}
    if _VISIBLE in process.environment:
        granted = [gpu for gpu in inherited.get(_VISIBLE, "").split(",") if gpu]
        wanted = [int(position) for position in process.environment[_VISIBLE].split(",") if position]
        if max(wanted, default=-1) >= len(granted):
            raise UsageError(
                f"{process.name} needs GPU {max(wanted)} of its node, counted from 0, and Slurm granted "
                f"{len(granted)} ({_VISIBLE}={inherited.get(_VISIBLE, '')!r}); correct gres and nodes in the site's "
                "file, or ask the site for its gres.conf"
            )
        environment[_VISIBLE] = ",".join(granted[position] for position in wanted)
    return environment


def main() -> int:
    """Run the process; returns its exit code as a shell counts it, 128 and the number of the signal that ended it."""
    parser = argparse.ArgumentParser(prog="python -m hetrl.runtime.run.step", description=main.__doc__)
    parser.add_argument("rows", type=Path, help="scripts/<job>.json")
    parser.add_argument("step", help="a step of the gang, or the index of an array's task")
    arguments = parser.parse_args()
    name = arguments.step
    try:
        process = process_of(read_processes(arguments.rows), arguments.step, os.environ)
        name = process.name
        _print_to(Path("logs") / f"{name}.log")
        note_start(name)
        environment = environment_of(process, os.environ)
    except HetrlError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        code = error.exit_code
    else:
        argv = [sys.executable if word == "python" else word for word in process.argv]
        code = _run(argv, environment)
        for _ in range(RESTARTS if arguments.step.isdigit() else 0):  # a task of an array
            if code not in _CRASHES:
                break
            note_end(name, code)
            print(
                f"it was ended by {signal.Signals(code - 128).name} and is started again", file=sys.stderr, flush=True
            )
            note_start(name)
            code = _run(argv, environment)
    note_end(name, code)
    if code and (failure := os.environ.get(_FAILURE)):
        with suppress(FileExistsError), Path(failure).open("x") as file:
            file.write(f"{code} {name}\n")
    return code


def _run(argv: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run a command to its end; it ends with this process, however that ends, and leaves no temporary files."""
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    remove_unheld()  # what is left of processes that were killed together with who had started them
    with private_directory() as held:
        child = {**environment, "TMPDIR": str(held.path)}
        code = subprocess.Popen(argv, env=child, pass_fds=held.lock, preexec_fn=_become).wait()
    remove_unheld()  # the weights of this node, where no other replica is left
    return code if code >= 0 else 128 - code


def _become() -> None:
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    end_with_parent()


def _print_to(path: Path) -> None:
    """Let everything that this process prints, and what it becomes, go to a log."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    os.close(descriptor)


if __name__ == "__main__":
    sys.exit(main())
