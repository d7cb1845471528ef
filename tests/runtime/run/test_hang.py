"""What hangs says where it stands, and ends; what is slow is left alone."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

HANG_SECONDS, GRACE_SECONDS = 0.5, 2.0


def watched(work: str) -> subprocess.CompletedProcess[str]:
    """Run a process that does this work under watch."""
    program = f"""
        import ctypes, threading, time
        from hetrl.runtime import hang
        hang.GRACE_SECONDS = {GRACE_SECONDS}

        def stuck_here():
            {work}

        with hang.HangWatch({HANG_SECONDS}, "alpha: rank 3").over("Train"):
            stuck_here()
        print("done")
    """
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=60, check=False
    )


def test_a_thread_that_waits_for_ever_is_shown_and_ends_the_process() -> None:
    ended = watched("threading.Event().wait()")
    assert (ended.returncode, ended.stdout) == (1, "")
    *stacks, last = ended.stderr.splitlines()
    assert last == (
        "error: alpha: rank 3 has been in Train for 0.5 s (launch.hang_timeout); its log says where each thread stands"
    )
    assert any("in stuck_here" in line for line in stacks)


def test_so_is_one_that_lets_nothing_of_python_run() -> None:
    ended = watched("ctypes.PyDLL(None).sleep(30)  # which holds the interpreter's lock")
    assert (ended.returncode, ended.stdout) == (1, "")
    assert "in stuck_here" in ended.stderr


@pytest.mark.parametrize("seconds", [0.0, HANG_SECONDS + GRACE_SECONDS / 4])
def test_what_is_done_in_time_goes_on(seconds: float) -> None:
    ended = watched(f"time.sleep({seconds})")
    assert (ended.returncode, ended.stdout) == (0, "done\n")
    assert "error" not in ended.stderr
