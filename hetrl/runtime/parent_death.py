"""Children that end with the process that started them, also where that one is killed."""

from __future__ import annotations

import ctypes
import signal

PR_SET_PDEATHSIG = 1  # linux/prctl.h

_libc = ctypes.CDLL(None)


def end_with_parent(number: int = signal.SIGTERM) -> None:
    """Ask the kernel, as a child or its `preexec_fn`, for a signal when the thread that started it ends (prctl(2))."""
    _libc.prctl(PR_SET_PDEATHSIG, number)
