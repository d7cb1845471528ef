"""A watch over work that may hang: a process that stands still says where each of its threads is, and ends.

watch = HangWatch(seconds, "alpha: rank 3 of actor_training")
with watch.over("Train"):
    ...             longer than that: the stacks of all threads, then an error as the last line, then the end
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

# Ranks of a world hang together: each has said where it stands before the first one ends and takes the others along.
GRACE_SECONDS = 5.0


class HangWatch:
    """Ends the process where one piece of work takes longer than so many seconds; one piece at a time is watched."""

    def __init__(self, seconds: float, who: str) -> None:
        self._seconds, self._who = seconds, who

    @contextmanager
    def over(self, doing: str) -> Iterator[None]:
        """Watch a piece of work."""
        done = threading.Event()
        threading.Thread(target=self._wait, args=(done, doing), name="hang watch", daemon=True).start()
        # Where nothing of Python runs any more, that thread neither: the interpreter's own watch needs no lock.
        faulthandler.dump_traceback_later(self._seconds + 2 * GRACE_SECONDS, exit=True)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()
            done.set()

    def _wait(self, done: threading.Event, doing: str) -> None:
        if done.wait(self._seconds):
            return
        faulthandler.dump_traceback(sys.stderr, all_threads=True)
        if done.wait(GRACE_SECONDS):
            print(f"{doing} took longer than {self._seconds:g} s, and is done", file=sys.stderr, flush=True)
            return
        stands = f"has been in {doing} for {self._seconds:g} s (launch.hang_timeout)"
        print(f"error: {self._who} {stands}; its log says where each thread stands", file=sys.stderr, flush=True)
        os._exit(1)
