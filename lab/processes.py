"""Start processes in the namespaces of others, and tell processes apart for good."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from lab.shape import JOB_USER

SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class LabError(Exception):
    """Something in the lab did not go as it must; says what was run, and what it said."""


def missing_of(tools: Iterable[str]) -> list[str]:
    """Return the programs that this machine lacks."""
    return [tool for tool in tools if shutil.which(tool, path=SYSTEM_PATH) is None]


def start_of(pid: int) -> str | None:
    """Return when a process started, in clock ticks since boot, None if there is none (proc(5), field 22 of stat).

    A process id comes back after a while; the pair of id and start does not.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (FileNotFoundError, ProcessLookupError):
        return None


def only_child_of(pid: int) -> int:
    """Return the one child of a process."""
    (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(child)


def enter(pid: int, user: str) -> list[str]:
    """Return what stands before a command that runs as `user` in the pod whose first process is `pid`.

    The command is killed when the process that entered is: without it, ending that one would leave it alone.
    """
    command = ["nsenter", f"--target={pid}", "--net", "--uts", "--mount", "--ipc", "--pid"]
    command += [f"--wdns={home_of(user)}", "setpriv", "--pdeathsig=KILL"]
    if user != "root":
        command += [f"--reuid={user}", f"--regid={user}", "--clear-groups"]
    return command


def home_of(user: str) -> str:
    """Return a user's home directory in the pods."""
    return f"/home/{user}" if user == JOB_USER else "/"


def environment_of(user: str, more: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a login, and nothing of the caller's own."""
    base = {"HOME": home_of(user), "USER": user, "LOGNAME": user, "SHELL": "/bin/bash", "LANG": "C.UTF-8"}
    return {**base, "PATH": SYSTEM_PATH, **more}


def call(
    argv: Sequence[str], timeout_seconds: float, check: bool = True, shown: str | None = None, **more: Any
) -> subprocess.CompletedProcess[str]:
    """Run a command and return its output; at the deadline, kill it with all that it started.

    Raises LabError at the deadline, and on a return code other than 0 where `check`; it names the command as `shown`.
    """
    shown = shown or shlex.join(argv)
    given = more.pop("input", None)
    more = {"stdin": subprocess.DEVNULL if given is None else subprocess.PIPE, **more}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(argv, text=True, start_new_session=True, **pipes, **more) as process:
        try:
            stdout, stderr = process.communicate(given, timeout=timeout_seconds)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            if isinstance(error, subprocess.TimeoutExpired):
                said = ""
                with suppress(subprocess.TimeoutExpired):  # one that left the group may hold the pipes
                    said = "".join(process.communicate(timeout=1.0))
                raise LabError(f"{shown}: not done after {timeout_seconds:g} s\n{said}".rstrip()) from None
            raise
    if check and process.returncode != 0:
        raise LabError(f"{shown}: return code {process.returncode}\n{stdout}{stderr}".rstrip())
    return subprocess.CompletedProcess(argv, process.returncode, stdout, stderr)


def wait_until(true: Callable[[], bool], seconds: float, problem: Callable[[], str]) -> None:
    """Return as soon as `true()`; raises LabError with `problem()` after the deadline."""
    began = asked = time.monotonic()
    while not true():
        now = time.monotonic()
        if now > began + seconds:
            raise LabError(f"{problem()} (after {seconds:g} s)")
        time.sleep(max(0.05, now - asked))  # at most half of the time is asked: programs that ask take a processor
        asked = time.monotonic()
