"""What the processes of a benchmark do with the processor, as the kernel counts it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

# ZeroMQ names its I/O threads so: they speak to the kernel and do CURVE.
_ZEROMQ_THREAD = "ZMQbg"


@dataclass(frozen=True)
class Cpu:
    """Seconds of processor time: of the threads that run our code, and of ZeroMQ's."""

    own_seconds: float = 0.0
    zeromq_seconds: float = 0.0

    def __add__(self, other: Cpu) -> Cpu:
        return Cpu(self.own_seconds + other.own_seconds, self.zeromq_seconds + other.zeromq_seconds)

    def __sub__(self, other: Cpu) -> Cpu:
        return Cpu(self.own_seconds - other.own_seconds, self.zeromq_seconds - other.zeromq_seconds)

    @property
    def seconds(self) -> float:
        """Return the sum."""
        return self.own_seconds + self.zeromq_seconds


def cpu_of(process: int | str = "self") -> Cpu:
    """Return what the threads of a process used since its start, in the kernel included.

    It is the scheduler's count (Documentation/scheduler/sched-stats.rst): that of /proc/PID/stat may be made of samples
    at the clock's ticks, on which programs wake.
    """
    used: Counter[bool] = Counter()
    for thread in Path(f"/proc/{process}/task").iterdir():
        running_ns, *_ = (thread / "schedstat").read_text().split()
        used[(thread / "comm").read_text().startswith(_ZEROMQ_THREAD)] += int(running_ns)
    return Cpu(used[False] / 1e9, used[True] / 1e9)


def cpu_of_all(processes: Mapping[str, list[int]]) -> dict[str, Cpu]:
    """Return the sum of each group of processes."""
    return {name: sum(map(cpu_of, pids), Cpu()) for name, pids in processes.items()}
