"""The ends of a server and its workers: in order, or with a word of where they hang."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import time
from collections.abc import Collection

import psutil

STOP_SECONDS = 10.0
STACKS_SECONDS = 1.0  # that a process has to say where its threads stand, before the next one does


def terminate(process: subprocess.Popen[bytes], workers: Collection[psutil.Process]) -> None:
    """Let the server end itself and its workers, then kill what remains."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(STOP_SECONDS)
    # Only a server that ended in order has told its workers to end.
    _wait_for(workers, STOP_SECONDS if process.returncode == 0 else 1.0)
    for worker in filter(_lives, workers):
        with contextlib.suppress(psutil.NoSuchProcess):
            worker.kill()
    process.kill()
    process.wait()


def end_with_stacks(pid: int, workers: Collection[psutil.Process]) -> None:
    """End a server that hangs, with its workers, also where they are stopped.

    Each first says in the server's log where its threads stand: `PYTHONFAULTHANDLER` is set for it. One after the
    other, as they write into one file, and the server last, with which its workers would end.
    """
    with contextlib.suppress(psutil.NoSuchProcess):
        server = psutil.Process(pid)
        server.suspend()  # it would end by itself, without a word, once a worker has
        for process in (*workers, server):
            for number in (signal.SIGABRT, signal.SIGCONT):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(number)
            _wait_for([process], STACKS_SECONDS)


def _wait_for(processes: Collection[psutil.Process], seconds: float) -> None:
    """Return when none of them lives any more, or after so long."""
    deadline = time.monotonic() + seconds
    while any(map(_lives, processes)) and time.monotonic() < deadline:
        time.sleep(0.05)


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
