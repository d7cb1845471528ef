"""`hetrl remote-task FILE`, on a site's login node: start the tasks that the file lists, and say which jobs they are.

The launcher runs it over ssh. submitit makes an array of each job's tasks, on Slurm or, for the local executor, of
processes of this machine. Each task runs its command in the file's directory, prints to logs/<task>.log, and leaves its
exit code in ended/<task>: whoever waits reads that, and asks no accounting.
"""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

# Few imports: where jobs run in a container, the login node's own python3 is what runs this file.
from hetrl.errors import HetrlError, UsageError
from hetrl.files import replace_text
from hetrl.runtime.parent_death import end_with_parent
from launch.shell import final_line

TASKS_FILE, JOBS_FILE = "tasks.json", "jobs"
ENDED, LOGS, SUBMITIT = "ended", "logs", "submitit"
Executor = Literal["slurm", "local"]
SLURM: Executor = "slurm"
LOCAL: Executor = "local"
# A step gets the GPUs and CPUs of its node, not those of the shell, as in slurm_templates/gang.sbatch.j2.
_UNSET = ("unset CUDA_VISIBLE_DEVICES SLURM_CPUS_PER_TASK SLURM_GPUS_PER_NODE",)
NO_SIGNAL_SECONDS = 30  # before the walltime submitit would signal a task to save itself; there is nothing to save


@dataclass(frozen=True)
class RemoteTask:
    """A command; the word `python` stands for the interpreter that runs it."""

    name: str
    argv: tuple[str, ...]


@dataclass(frozen=True)
class RemoteJob:
    """Equal tasks, each on `nodes` nodes with one process per node.

    `options` are those of sbatch (`--partition=gpu`), `srun` those of srun; the local executor needs neither, and shows
    a task `gpus` GPUs of this machine. `unmanaged` is CUDA_VISIBLE_DEVICES where Slurm knows of no GPUs.
    """

    name: str
    tasks: tuple[RemoteTask, ...]
    seconds: float
    nodes: int = 1
    options: tuple[str, ...] = ()
    srun: tuple[str, ...] = ()
    gpus: int = 0
    unmanaged: str = ""


@dataclass(frozen=True)
class RemoteJobs:
    """What `tasks.json` says. `setup` are lines of bash before a task, `python` is what starts it, as bash reads it."""

    executor: Executor
    key: str
    python: str
    setup: tuple[str, ...]
    jobs: tuple[RemoteJob, ...]


def remote_task_command(arguments: argparse.Namespace) -> int:
    """Start all tasks of the file; a line per job, `name id`, goes to stdout and to `jobs` beside the file."""
    path: Path = arguments.file
    asked = read_tasks(path)
    directory = path.absolute().parent
    for folder in (LOGS, ENDED):
        (directory / folder).mkdir(exist_ok=True)
    for job in asked.jobs:
        for job_id in submit(asked, job, directory):
            with (directory / JOBS_FILE).open("a") as jobs:  # one by one: what is started can be cancelled from now on
                print(job.name, job_id, file=jobs)
            print(job.name, job_id, flush=True)
    return 0


def read_tasks(path: Path) -> RemoteJobs:
    """Read a file of tasks; raises UsageError where it is not one."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=RemoteJobs)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}; `hetrl probe` writes such files") from None
    except msgspec.MsgspecError as error:
        raise UsageError(f"{path}: not a file of tasks ({error})") from None


def submit(asked: RemoteJobs, job: RemoteJob, directory: Path) -> list[str]:
    """Start a job's tasks and return the ids to cancel: one of an array, or one per process.

    Raises HetrlError where sbatch refuses.
    """
    from submitit import LocalExecutor, SlurmExecutor
    from submitit.core.utils import FailedJobError, FailedSubmissionError

    folder = directory / SUBMITIT
    kind = SlurmExecutor if asked.executor == SLURM else LocalExecutor
    try:
        executor = kind(folder, python=asked.python)
        executor.update_parameters(**parameters(asked, job))
        started = executor.map_array(perform, job.tasks, [str(directory)] * len(job.tasks))
    except (FailedJobError, FailedSubmissionError, RuntimeError) as error:
        raise HetrlError(f"{job.name}: sbatch did not take it: {final_line(str(error)) or error}") from None
    return list(dict.fromkeys(one.job_id.split("_")[0] for one in started))


def parameters(asked: RemoteJobs, job: RemoteJob) -> dict[str, object]:
    """Return a job as submitit's executors take it."""
    minutes = math.ceil(job.seconds / 60)
    if asked.executor == LOCAL:
        return {"timeout_min": minutes, "gpus_per_node": job.gpus}
    words = (option.removeprefix("--").partition("=") for option in job.options)
    more: Mapping[str, object] = {name: value if sign else True for name, sign, value in words}
    return {
        "job_name": key_of(asked.key, job.name),
        "time": minutes,
        "nodes": job.nodes,
        "ntasks_per_node": 1,
        "setup": [*asked.setup, *_UNSET, *([f"export CUDA_VISIBLE_DEVICES={job.unmanaged}"] if job.unmanaged else [])],
        "signal_delay_s": NO_SIGNAL_SECONDS,
        "srun_args": list(job.srun),
        "stderr_to_stdout": True,
        "wckey": None,  # else submitit gives one of its own
        "additional_parameters": more,
    }


def key_of(run: str, job: str) -> str:
    """Return the name by which Slurm knows a job."""
    return f"{run}-{job}"


def perform(task: RemoteTask, directory: str) -> int:
    """Run a task where Slurm has placed it; returns its exit code, and leaves it in a file.

    With several nodes each runs the command; the first speaks for all.
    """
    place = Path(directory)
    rank = os.environ.get("SLURM_PROCID", "0")
    name = task.name if rank == "0" else f"{task.name}.{rank}"
    argv = [sys.executable if word == "python" else word for word in task.argv]
    with (place / LOGS / f"{name}.log").open("ab") as log:
        # Open files stay open in the command: one is how MPI reaches Slurm (PMI_FD).
        code = subprocess.call(
            argv,
            cwd=place,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            close_fds=False,
            preexec_fn=end_with_parent,
        )
    replace_text(place / ENDED / name, f"{code}\n")
    return code
