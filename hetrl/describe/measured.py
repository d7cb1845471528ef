"""What one machine measured: `topology/measured/NAME-DATE.json`, format `hetrl-measured/1`, written by `hetrl profile`.

A file is dated and never edited. It has every raw sample, so that what was derived from them can be derived again, and
a line for each thing that could not be measured. Seconds are of one repetition; `work` is what one repetition does, in
FLOPs, bytes or tokens.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AwareDatetime, ConfigDict, Field

from hetrl.files import replace_json
from hetrl.gpus import PHASES, gpu_catalogue, words

FORMAT = "hetrl-measured/1"
Phase = Annotated[str, Field(pattern=f"^({'|'.join(PHASES)})$")]
Use = Literal["fit", "held out", "record"]
Question = Mapping[str, str | int | float]
_Number = Annotated[float, Field(gt=0, allow_inf_nan=False)]


@dataclass(frozen=True)
class Measurement:
    """One question to the machine and every answer: `seconds` of the repetitions after `warm_up` others.

    `use` says whether the efficiencies were fitted to it, whether it checks them, or neither.
    """

    kind: str
    question: Question
    unit: str  # of `work`: flops | bytes | tokens
    work: Annotated[float, Field(gt=0)]
    warm_up: int
    seconds: Annotated[tuple[_Number, ...], Field(min_length=1)]
    use: Use = "record"

    @property
    def median_seconds(self) -> float:
        """Return the median of the repetitions."""
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """Return the distance of the quartiles over the median; 0 for fewer than two repetitions."""
        if len(self.seconds) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return (high - low) / self.median_seconds

    @property
    def rate(self) -> float:
        """Return the work per second at the median."""
        return self.work / self.median_seconds

    @property
    def name(self) -> str:
        """Return kind and question in one line, without the architecture."""
        words = [str(value) for key, value in self.question.items() if isinstance(value, str) and key != "architecture"]
        numbers = [f"{key} {value}" for key, value in self.question.items() if not isinstance(value, str)]
        return ", ".join([" ".join([self.kind, *words]), *numbers])


@dataclass(frozen=True)
class Skipped:
    """What was not measured, and why."""

    kind: str
    why: str


@dataclass(frozen=True)
class Check:
    """A layer's time that the fit did not see, as the cost model predicts it with the fitted shares."""

    name: str
    measured_seconds: _Number
    predicted_seconds: _Number

    @property
    def error(self) -> float:
        """Return predicted / measured - 1."""
        return self.predicted_seconds / self.measured_seconds - 1


@dataclass(frozen=True)
class Exchange:
    """An all-reduce between two ranks of the machine: `2 delay + 2 (n-1)/n bytes / bandwidth` (hetrl.cost.network)."""

    backend: str
    ranks: int
    delay_ms: Annotated[float, Field(ge=0)]
    gbps: _Number


@dataclass(frozen=True)
class Measured:
    """One file: where and when, every measurement, and what follows from them for the GPU type `gpu`.

    `shares` are the efficiencies per phase (hetrl.cost.efficiency.Efficiency), for the phases that could be measured.
    """

    gpu: str
    measured_at: AwareDatetime
    command: str
    machine: Mapping[str, str | int | float]
    software: Mapping[str, str]
    measurements: tuple[Measurement, ...]
    skipped: tuple[Skipped, ...] = ()
    shares: Mapping[Phase, _Number] = field(default_factory=dict)
    checks: tuple[Check, ...] = ()
    exchange: Exchange | None = None

    __pydantic_config__ = ConfigDict(extra="forbid")

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object of the file."""
        return {"format": FORMAT, **asdict(self), "measured_at": self.measured_at.isoformat(timespec="seconds")}


def write_measured(path: Path, measured: Measured) -> None:
    """Write one file in one go; raises OSError."""
    replace_json(path, measured.to_json())


def merge(files: Iterable[Measured]) -> dict[str, dict[str, float]]:
    """Return {GPU type: {phase: share}}: each from the latest file that has it."""
    merged: dict[str, dict[str, float]] = {}
    for one in sorted(files, key=lambda file: file.measured_at):
        if one.shares:
            merged.setdefault(one.gpu, {}).update(one.shares)
    return merged


def gpu_of(device: str) -> str | None:
    """Return the catalogue type of a device by the name that its driver gives it; None where none fits.

    The words of a catalogue name must all be of the driver's (`NVIDIA A100-SXM4-80GB`: a100, 80gb); of several the one
    with the most words is meant. What the driver calls `MIG` is a slice, never the whole GPU.
    """
    said = words(device)
    fitting = [one.name for one in gpu_catalogue().values() if words(one.name) <= said]
    fitting = [name for name in fitting if bool(gpu_catalogue()[name].slice_of) == ("mig" in said)]
    return max(fitting, key=lambda name: (len(words(name)), name), default=None)


def file_name(host: str, gpu: str, measured_at: datetime) -> str:
    """Return `HOST-GPU-DATE.json`; letters of the host that a file name should not have become dashes."""
    safe = re.sub(r"[^A-Za-z0-9.]+", "-", host).strip("-.") or "host"
    return f"{safe}-{gpu}-{measured_at:%Y-%m-%d}.json"
