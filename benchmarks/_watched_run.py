"""Looks at the processes of a run with emulated engines: what they take in a step, how soon a death is noticed."""

from __future__ import annotations

import signal
import threading
import time
from dataclasses import dataclass

import psutil

from launch.run_directory import Run

FIRST_STEPS = 2  # of which nothing is measured
SETTLE_SECONDS, IDLE_SECONDS = 10.0, 30.0


@dataclass
class Watch:
    """Looks at a run's processes over its `steps`; without, it stops one site's once two steps are done."""

    steps: int | None
    memory: dict[str, float]
    controller_share: float = 0.0
    cpu_seconds: float = 0.0
    death_seconds: float | None = None

    def __call__(self, run: Run, over: threading.Event) -> None:
        """Wait for the steps, measure, and stop a site."""
        if not _came(run, over, "step", FIRST_STEPS):
            return
        found = {one.cmdline()[2]: one for one in _processes(run, "s00")}
        self.memory |= {name: one.memory_full_info().uss / 1e6 for name, one in found.items()}
        controller = next(one for name, one in found.items() if name.endswith("controller"))
        others = [one for one in _processes(run, "s01") if one.cmdline()[2].endswith("emulated.site")]
        self.memory["replicas"] = others[0].memory_full_info().uss / 1e6
        if self.steps is None:
            self._stop(run, over, others[0])
            return
        everybody = _processes(run)
        first, began = _count(run, "step"), time.monotonic()
        before = [_cpu_seconds(controller), sum(map(_cpu_seconds, everybody))]
        _came(run, over, "step", self.steps - 1)
        self.controller_share = (_cpu_seconds(controller) - before[0]) / (time.monotonic() - began)
        self.cpu_seconds = (sum(map(_cpu_seconds, everybody)) - before[1]) / (_count(run, "step") - first)

    def _stop(self, run: Run, over: threading.Event, process: psutil.Process) -> None:
        expected = sum('"s01/' in line for line in run.events.read_text().splitlines() if "member_ready" in line)
        process.send_signal(signal.SIGSTOP)
        began = time.monotonic()
        if _came(run, over, "replica_lost", expected):
            self.death_seconds = time.monotonic() - began
        process.send_signal(signal.SIGKILL)  # which ends the run


@dataclass
class Idle:
    """Measures which share of a core a run's processes take while their engines work on the first samples."""

    share: float = 0.0

    def __call__(self, run: Run, over: threading.Event) -> None:
        """Wait until all is quiet, measure, and end the run."""
        if not _came(run, over, "go", 1) or over.wait(SETTLE_SECONDS):
            return
        everybody, began = _processes(run), time.monotonic()
        before = sum(map(_cpu_seconds, everybody))
        over.wait(IDLE_SECONDS)
        self.share = (sum(map(_cpu_seconds, everybody)) - before) / (time.monotonic() - began)
        for process in _processes(run, "s01"):
            process.send_signal(signal.SIGKILL)


def _came(run: Run, over: threading.Event, kind: str, count: int) -> bool:
    """Wait for so many events of a kind; return whether they came before the run was over."""
    while not over.wait(0.1):
        if _count(run, kind) >= count:
            return True
    return False


def _count(run: Run, kind: str) -> int:
    """Return how many events of a kind there are so far."""
    return run.events.read_text().count(f'"kind": "{kind}"') if run.events.exists() else 0


def _processes(run: Run, site: str | None = None) -> list[psutil.Process]:
    """Return the processes of a run, all or those of one site."""
    found, where = [], str(run.path if site is None else run.site(site))
    for process in psutil.process_iter():
        try:
            if process.environ().get("HETRL_SITE_DIRECTORY", "").startswith(where) and len(process.cmdline()) > 2:
                found.append(process)
        except psutil.Error:
            continue
    return found


def _cpu_seconds(process: psutil.Process) -> float:
    return float(sum(process.cpu_times()[:2]))
