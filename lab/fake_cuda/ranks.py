"""A process that plays ranks of GPU worlds, one after the other, on the fake device."""

from __future__ import annotations

import subprocess
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ANSWER_SECONDS = 600.0


@dataclass(frozen=True)
class Played:
    """What a rank returned, and the most bytes that its device held (`peak_bytes`)."""

    result: Any
    peak_bytes: int


class RankError(Exception):
    """A rank raised; the message is its traceback."""


class Stage:
    """The process; `play` calls a module-level function in it, inside the fake device."""

    def __init__(self) -> None:
        self._connection, theirs = Pipe()
        # Not by multiprocessing: its children import what the main module imports, and torch must not be there yet.
        command = [sys.executable, "-m", "lab.fake_cuda.ranks", str(theirs.fileno())]
        self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], cwd=Path(__file__).parents[2])
        theirs.close()

    def __enter__(self) -> Stage:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()  # torch's own end of CUDA streams would abort
        self._process.wait()

    def play(self, function: Callable[..., Any], *arguments: Any) -> Played:
        """Return what the function returned; raises RankError with what it raised."""
        self._connection.send((function, arguments))
        if not self._connection.poll(ANSWER_SECONDS):
            raise RankError(f"no answer in {ANSWER_SECONDS:g} s")
        try:
            good, answer = self._connection.recv()
        except (EOFError, ConnectionError):
            raise RankError(f"the process ended with exit code {self._process.wait()}") from None
        if not good:
            raise RankError(answer)
        return answer


def serve(connection: Connection) -> None:
    """Play what arrives until the parent is gone."""
    from lab.fake_cuda import library

    library.load()
    import torch

    from lab.fake_cuda import device, world

    device.install()
    world.install()
    torch.set_num_threads(1)
    while True:
        fake = device.FakeCuda()
        try:
            function, arguments = connection.recv()
            with fake:
                result = function(*arguments)
            connection.send((True, Played(result, fake.peak_bytes)))
        except EOFError:
            return
        except BaseException:
            connection.send((False, traceback.format_exc()))
        world.leave()


if __name__ == "__main__":
    from lab.fake_cuda import ranks  # what is pickled names this module, not __main__

    ranks.serve(Connection(int(sys.argv[1])))
