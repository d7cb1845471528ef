"""Time a piece of work on a device: warm-up, repetitions until a deadline, every sample kept."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

_LEAST_SECONDS = 0.005  # of one sample: short work is repeated inside it, so that clock and launch do not count
_MOST_INNER = 1000


@dataclass(frozen=True)
class Repetitions:
    """`warm_up` runs that do not count, then at most `count` samples, none begun after `seconds`."""

    warm_up: int
    count: int
    seconds: float

    def times(self, run: Callable[[], object], device: torch.device) -> tuple[float, ...]:
        """Return the seconds of one run, a sample per repetition; at least one."""
        for _ in range(max(self.warm_up, 1)):
            run()
        inner = max(1, min(math.ceil(_LEAST_SECONDS / _sample(run, 1, device)), _MOST_INNER))
        deadline = time.monotonic() + self.seconds
        samples = [_sample(run, inner, device)]
        while len(samples) < self.count and time.monotonic() < deadline:
            samples.append(_sample(run, inner, device))
        return tuple(samples)


def _sample(run: Callable[[], object], inner: int, device: torch.device) -> float:
    """Return the mean seconds of `inner` runs: the device's own clock on CUDA, for launches return at once there."""
    if device.type != "cuda":
        start = time.perf_counter()
        for _ in range(inner):
            run()
        return max(time.perf_counter() - start, 1e-9) / inner
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize(device)
    begin.record()
    for _ in range(inner):
        run()
    end.record()
    torch.cuda.synchronize(device)
    return max(float(begin.elapsed_time(end)) / 1e3, 1e-9) / inner
