"""Launchers whose processes begin as copies of one that has imported what they import.

Imports are half of what a short run of many ranks takes. Here one process makes them, once for many runs:

    python -m lab.planned.copies            imports, then waits for requests
      fork: python -m launch.cli ...        the launcher, with its own directory, environment and output
        fork: python -m hetrl.runtime...    what the local executor starts: a session, log and environment of its own

They do what they would do if they were started, except for one thing: `/proc/PID/environ` shows the first process's
environment, so that the launcher's sweep finds them by their sessions only. vLLM's servers are started as ever.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import random
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

from hetrl.runtime.parent_death import end_with_parent
from lab.lab import ROOT

# What the processes are, or import late.
_MODULES = (
    *("launch.cli", "launch.local", "launch.verbs.submit", "hetrl.runtime.gateway.gateway_process"),
    *("hetrl.runtime.run.controller", "hetrl.runtime.run.trainer", "hetrl.runtime.run.rollout"),
)
# Libraries read these when they are imported; ranks without a GPU are started with them, too.
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "CUDA_VISIBLE_DEVICES": ""}
END_SECONDS = 60.0


class Copies:
    """The process that has imported, until the end of the context; one launcher at a time is a copy of it."""

    def __init__(self) -> None:
        self._connection, theirs = Pipe()
        command = [sys.executable, "-m", "lab.planned.copies", str(theirs.fileno())]
        environment = {**os.environ, **_ENVIRONMENT}
        self._server = subprocess.Popen(command, cwd=ROOT, env=environment, pass_fds=[theirs.fileno()])
        theirs.close()

    def __enter__(self) -> Copies:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.terminate()  # and so a launcher that has not ended
        self._server.wait()
        self._connection.close()

    def launch(self, arguments: Sequence[str], environment: Mapping[str, str], output: Path) -> None:
        """Begin `hetrl ARGUMENTS`, which prints to a file; the launcher before must have ended."""
        self._connection.send(([*arguments], {**environment}, output))
        self._launcher = self._answer()

    def wait(self, seconds: float) -> int | None:
        """Return how the launcher ended, as subprocess counts it; None while it has not in so many seconds."""
        return self._answer() if self._connection.poll(seconds) else None

    def end(self) -> None:
        """Let the launcher, which has not ended, end the processes of every site."""
        os.kill(self._launcher, signal.SIGTERM)
        if self.wait(END_SECONDS) is None:
            raise TimeoutError(f"the launcher, process {self._launcher}, did not end in {END_SECONDS:g} s")

    def _answer(self) -> int:
        try:
            return int(self._connection.recv())
        except (EOFError, ConnectionError):
            raise ChildProcessError(f"lab.planned.copies ended with exit code {self._server.wait()}") from None


class Copy:
    """A process that the local executor starts: what it uses of `subprocess.Popen`, by a fork of this process."""

    def __init__(
        self,
        argv: Sequence[str],
        *,
        cwd: Path,
        env: Mapping[str, str],
        pass_fds: Sequence[int],
        stdin: int,
        stdout: IO[bytes],
        stderr: int,
        start_new_session: bool,
    ) -> None:
        assert (stdin, stderr, start_new_session) == (subprocess.DEVNULL, subprocess.STDOUT, True)
        interpreter, option, module, *arguments = argv
        assert (interpreter, option) == (sys.executable, "-m")
        self._code: int | None = None
        self.pid = _fork(partial(_become, module, arguments, env, cwd, stdout.fileno(), pass_fds))

    def poll(self) -> int | None:
        """Return how it ended, None where it has not."""
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code


def _fork(become: Callable[[], None]) -> int:
    """Return the id of a child that becomes something, and ends as an interpreter does."""
    if pid := os.fork():
        return pid
    code: Any = 1
    try:
        become()
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        threading._shutdown()  # type: ignore[attr-defined]  # waits for its threads
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _become(
    module: str,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    directory: Path,
    output: int,
    kept: Sequence[int] = (),
) -> None:
    """Run a module as the main one, as a process that was started for it does."""
    os.setsid()
    os.chdir(directory)
    for descriptor, standard in ((os.open(os.devnull, os.O_RDONLY), 0), (output, 1), (output, 2)):
        os.dup2(descriptor, standard)
    for descriptor in {int(path.name) for path in Path("/proc/self/fd").iterdir()} - {0, 1, 2, *kept}:
        with suppress(OSError):  # the one by which they were listed
            os.close(descriptor)
    os.environ.clear()
    os.environ.update(environment)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    tempfile.tempdir = None
    random.seed()
    sys.argv[1:] = arguments
    sys.modules.pop(module, None)  # else it would be there twice
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _launch(arguments: Sequence[str], environment: Mapping[str, str], output: Path) -> None:
    end_with_parent()
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    _become("launch.cli", arguments, environment, ROOT, descriptor)


def main() -> None:
    """Import, then begin launchers until nobody asks for one any more."""
    end_with_parent()
    connection = Connection(int(sys.argv[1]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # as the ranks ignore what megatron says of what is not installed
        modules = {name: importlib.import_module(name) for name in _MODULES}
    popen = SimpleNamespace(Popen=Copy, DEVNULL=subprocess.DEVNULL, STDOUT=subprocess.STDOUT)
    setattr(modules["launch.local"], "subprocess", popen)  # noqa: B010  # a module's, whatever its type
    gc.freeze()  # what all copies share is not written to
    with suppress(EOFError):
        while True:
            request = connection.recv()
            pid = _fork(partial(_launch, *request))
            connection.send(pid)
            connection.send(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


if __name__ == "__main__":
    main()
