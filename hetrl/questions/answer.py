"""The answer to a single question: how long, for how much, does it fit, what binds, and what it rests on."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hetrl.cost.efficiency import Efficiencies
from hetrl.errors import UsageError

_BINDS = {
    "transfer": "the slowest link or network card",
    "pause": "loading the weights",
    "weights": "memory bandwidth (weights)",
    "keys and values": "memory bandwidth (keys and values)",
    "step overhead": "fixed time per decode step",
    "products": "matrix products",
    "prefill": "matrix products (prefill)",
    "compute": "matrix products",
    "communication": "communication",
    "pipeline": "pipeline bubble",
    "update": "optimiser update",
    "host transfer": "transfers to host memory",
}


@dataclass(frozen=True)
class Answer:
    """`seconds` for `tokens` on `gpus` GPUs; `breakdown` sums to the seconds; `memory_gb` is the fullest GPU's.

    Of the phases that the answer uses, per GPU type: `uncalibrated` has those that nobody measured, `measured` those
    whose efficiency comes from a measured file.
    """

    seconds: float
    tokens: float
    gpus: int
    breakdown: Mapping[str, float]
    memory_gb: float
    usable_gb: float
    uncalibrated: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    measured: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def fits(self) -> bool:
        """Return whether the memory suffices."""
        return self.memory_gb <= self.usable_gb

    @property
    def binds(self) -> str:
        """Return what takes the largest part of the time."""
        part = max(self.breakdown, key=lambda name: self.breakdown[name])
        return _BINDS.get(part, part)

    def to_json(self) -> dict[str, Any]:
        """Return the answer as a JSON object."""
        rate = self.tokens / self.seconds if self.seconds else 0.0
        return {
            "seconds": self.seconds,
            "tokens_per_second": rate,
            "tokens_per_second_per_gpu": rate / self.gpus,
            "breakdown": dict(self.breakdown),
            "memory_gb": self.memory_gb,
            "usable_gb": self.usable_gb,
            "fits": self.fits,
            "binds": self.binds,
            "calibrated": not self.uncalibrated,
            "uncalibrated": {gpu: list(phases) for gpu, phases in self.uncalibrated.items()},
            "measured": {gpu: list(phases) for gpu, phases in self.measured.items()},
            **({"details": dict(self.details)} if self.details else {}),
        }


def sources(efficiencies: Efficiencies, gpu: str, *phases: str) -> dict[str, dict[str, tuple[str, ...]]]:
    """Return the fields of an answer that say where the efficiencies of these phases come from."""
    known = efficiencies.of(gpu)
    inferred, measured = (
        tuple(phase for phase in phases if phase in source) for source in (known.inferred, known.measured)
    )
    return {"uncalibrated": {gpu: inferred} if inferred else {}, "measured": {gpu: measured} if measured else {}}


def positive(**numbers: float | None) -> None:
    """Raise UsageError for the first given number that is not positive."""
    for name, value in numbers.items():
        if value is not None and not 0 < value < math.inf:
            raise UsageError(f"--{name.replace('_', '-')} must be positive, not {value:g}")
