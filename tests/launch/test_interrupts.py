from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hetrl.files import read_lines
from launch.local import stop_processes
from launch.run_directory import Run
from tests.launch.launch_cases import ROOT, left_of, until

DRIVE = (
    "from tests.launch.launch_cases import *; "
    "drive({'gateway': SLEEPER, 'controller': ENDLESS_CONTROLLER, 'actor_training__0': SLEEPER})"
)


@pytest.fixture
def driven(tmp_path):
    """Start a launcher in a process of its own; returns a function from its stdin and stderr to (process, run)."""
    started: list[subprocess.Popen[str]] = []

    def drive(**streams):
        environment = {**os.environ, "HETRL_RUNS": str(tmp_path), "PYTHONPATH": str(ROOT)}
        process = subprocess.Popen(
            [sys.executable, "-c", DRIVE], env=environment, stdout=subprocess.PIPE, text=True, **streams
        )
        started.append(process)
        run = Run(tmp_path.resolve() / process.stdout.readline().strip())
        until(lambda: run.state.exists() and json.loads(run.state.read_text())["step"] == 1, "the first step")
        assert len(left_of(run)) == 3
        return process, run

    yield drive
    for process in started:
        process.kill()
        process.wait()
    for path in tmp_path.iterdir():
        stop_processes(Run(path), [])


def phase_of(run):
    return json.loads(run.state.read_text())["phase"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_signal_without_a_terminal_stops_everything_without_asking(driven, number, code):
    process, run = driven(stdin=subprocess.DEVNULL, stderr=subprocess.PIPE)
    process.send_signal(number)
    _, talk = process.communicate(timeout=30)
    assert process.returncode == code
    assert "Stop the run?" not in talk
    assert left_of(run) == []
    assert phase_of(run) == "cancelled"


def ignore_hangup() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


def test_a_run_under_nohup_outlives_its_terminal(driven):
    process, run = driven(stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, preexec_fn=ignore_hangup)
    status = Path(f"/proc/{process.pid}/status").read_text()
    (ignored,) = [line.split()[1] for line in status.splitlines() if line.startswith("SigIgn:")]
    assert int(ignored, 16) & 1 << signal.SIGHUP - 1
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert process.returncode == 143
    assert left_of(run) == []


CLEANING = """
import signal, sys, time
from launch.interrupts import ended_by_signals
with ended_by_signals():
    try:
        print("on", flush=True)
        time.sleep(60)
    finally:
        signal.raise_signal(signal.SIGTERM)
        print("cleaning up", file=sys.stderr, flush=True)
        print("clean", file=open(sys.argv[1], "w"))
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_what_a_signal_ends_cleans_up_once(number, code, tmp_path):
    terminal = Terminal()
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", CLEANING, str(tmp_path / "done")]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=terminal.theirs, text=True)
    assert process.stdout.readline() == "on\n"
    if number == signal.SIGHUP:
        terminal.close()
    process.send_signal(number)
    assert process.wait(30) == code
    assert (tmp_path / "done").read_text() == "clean\n"


class Terminal:
    """The user's side of a pseudo-terminal; what was printed to it collects in `text`."""

    def __init__(self):
        self._mine, self.theirs = pty.openpty()
        os.set_blocking(self._mine, False)
        self.text = ""

    def type(self, text):
        os.write(self._mine, text.encode())

    def close(self):
        os.close(self._mine)

    def shows(self, text):
        with contextlib.suppress(BlockingIOError):
            self.text += os.read(self._mine, 4096).decode()
        return text in self.text


def test_ctrl_c_on_a_terminal_asks_and_no_lets_the_run_go_on_and_yes_stops_it(driven):
    terminal = Terminal()
    process, run = driven(stdin=terminal.theirs, stderr=terminal.theirs)
    process.send_signal(signal.SIGINT)
    until(lambda: terminal.shows("Stop the run? [Y/n]"), "the question")
    terminal.type("n\n")
    until(lambda: terminal.shows("The run goes on."), "the answer no is taken")
    assert process.poll() is None
    assert len(left_of(run)) == 3
    terminal.text = ""
    process.send_signal(signal.SIGINT)
    until(lambda: terminal.shows("Stop the run? [Y/n]"), "the second question")
    terminal.type("\n")
    assert process.wait(30) == 130
    assert left_of(run) == []
    assert phase_of(run) == "cancelled"


def test_second_ctrl_c_is_a_yes(driven):
    terminal = Terminal()
    process, run = driven(stdin=terminal.theirs, stderr=terminal.theirs)
    process.send_signal(signal.SIGINT)
    until(lambda: terminal.shows("Stop the run?"), "the question")
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 130
    assert left_of(run) == []


def cancel(run):
    environment = {**os.environ, "HETRL_RUNS": str(run.path.parent)}
    command = [sys.executable, "-m", "launch.cli", "cancel", run.id]
    return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=60)


def test_cancel_from_another_terminal_ends_the_run_and_its_launcher(driven):
    process, run = driven(stdin=subprocess.DEVNULL, stderr=subprocess.PIPE)
    done = cancel(run)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"{run.id} is cancelled; ")
    assert process.wait(30) == 130
    assert left_of(run) == []
    assert phase_of(run) == "cancelled"
    kinds = [row["kind"] for row in read_lines(run.events)]
    assert kinds.index("cancelled") < kinds.index("process_exited")
    assert cancel(run).stdout == f"{run.id} is cancelled already; nothing runs\n"


def test_cancel_ends_what_a_killed_launcher_left(driven):
    process, run = driven(stdin=subprocess.DEVNULL, stderr=subprocess.PIPE)
    process.kill()
    process.wait()
    assert len(left_of(run)) == 3
    assert cancel(run).stdout == f"{run.id} is cancelled; 3 processes stopped\n"
    assert left_of(run) == []
    assert Path(run.state).exists() and phase_of(run) == "cancelled"
