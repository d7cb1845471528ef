"""The part of the benchmark `sync` about deltas: versions of real optimiser steps, replayed over shaped links."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _results import ROOT
from _weight_steps import STEPS

from lab.worlds.gateways import Shape

SHAPE = Shape(1.0, 50.0, 1e-4)
SIZES, RATES = ("0.1B", "0.35B"), (1e-6, 1e-5)
REPEATS = 3
TO_REACH = {1: 50.0, 4: 18.0}  # fewer bytes than the full set, by the steps per version
LARGE = 8.19e9 * 2  # bytes of Qwen3-8B in bf16
CORES = 8  # of a node, for the projection
LINK_SHARE = 0.9  # of the link that a stream of this length gets, for the projection

# What the trainer is asked to publish: a file, to how many receivers, and whether as changes to the version before.
Publish = Callable[[str, int, bool], tuple[Mapping[str, Any], Mapping[str, float]]]


@dataclass(frozen=True)
class Setting:
    """What is measured: models, learning rates, and how often."""

    sizes: Sequence[str] = SIZES
    rates: Sequence[float] = RATES
    repeats: int = REPEATS


def measure_deltas(publish: Publish, receivers: int, setting: Setting) -> list[dict[str, Any]]:
    """Make the versions of every model and rate, and replay those of every number of steps, forth and back."""
    rows = []
    for size in setting.sizes:
        for rate in setting.rates:
            with tempfile.TemporaryDirectory() as directory:
                script = ROOT / "benchmarks" / "_weight_steps.py"
                subprocess.run([sys.executable, script, directory, size, str(rate)], check=True, stdout=sys.stderr)
                files = {step: str(Path(directory) / f"steps-{step}.safetensors") for step in STEPS}
                full, full_cpu = publish(files[0], receivers, False)
                where = {"model": size, "rate": rate, "receivers": receivers}
                rows.append({**where, "steps": None, **_row([(full, full_cpu)], receivers)})
                for step in STEPS[1:]:
                    # Back to version 0 as many words change as forth.
                    order = [files[step], files[0]] * setting.repeats
                    taken = [publish(file, receivers, True) for file in order]
                    rows.append({**where, "steps": step, **_row(taken, receivers)})
                    print(rows[-1], file=sys.stderr, flush=True)
    return rows


def _row(taken: Sequence[tuple[Mapping[str, Any], Mapping[str, float]]], receivers: int) -> dict[str, Any]:
    """Return the median of what was published so."""
    if any(len(one["apply_seconds"]) != receivers for one, _ in taken):
        raise RuntimeError(f"a replica did not prove a version: {taken}")
    taken = sorted(taken, key=lambda one: float(one[0]["seconds"]))
    published, cpu = taken[len(taken) // 2]
    sent = published["delta_bytes"] or published["bytes"]
    return {
        "bytes": published["bytes"],
        "fewer": published["bytes"] / sent,
        "changed": published["changed"],
        "seconds": published["seconds"],
        "cpu_seconds_per_gb": {name: seconds / published["bytes"] * 1e9 for name, seconds in cpu.items()},
        "repaired": sum(len(one["repaired"]) for one, _ in taken),
    }


def projected_seconds(row: Mapping[str, Any]) -> float:
    """Return the seconds of such a version of an 8B model: bytes by the link, work by processor seconds on all cores.

    Trainer and replicas work at the same time as the link; the slowest of the three counts, and half a round trip.
    """
    link = LARGE / row["fewer"] * 8e-9 / (SHAPE.gbps * LINK_SHARE)
    work = row["cpu_seconds_per_gb"]["members"] / (1 + row["receivers"]) * LARGE * 1e-9 / CORES
    return float(max(link, work) + 2 * SHAPE.delay_ms * 1e-3)


def delta_lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the table."""
    lines = [
        f"Versions as deltas over {SHAPE}: recorded steps of a Qwen3 with random weights under a policy gradient, "
        "replayed; seconds from the trainer's first byte to the word of every replica that all of the version is "
        "proven on its node (vLLM's loading is left out). Fewer: bytes of the full set over those sent. Every version "
        "arrived with the digest of what was published. To reach: "
        + ", ".join(f"{times:g}x at {steps}" for steps, times in TO_REACH.items())
        + " steps per version, which at 1e-5 no code of places alone can (docs/decisions.md). The last column is no "
        f"measurement: an 8B model in bf16, its bytes by this ratio over {LINK_SHARE:.0%} of the link, its work by "
        f"these processor seconds on {CORES} cores of each node.",
        "",
        "| model | rate | steps | changed | fewer bytes | seconds | trainer and replicas, cpu s/GB | gateways "
        "| 8B, projected |",
        "| --- " * 9 + "|",
    ]
    for row in rows:
        cpu = row["cpu_seconds_per_gb"]
        steps, changed = row["steps"] or "full set", f"{row['changed']:.2%}" if row["changed"] is not None else ""
        projected = f"{projected_seconds(row):.1f} s" if row["steps"] else ""
        lines.append(
            f"| {row['model']} | {row['rate']:g} | {steps} | {changed} | {row['fewer']:.0f}x | {row['seconds']:.2f} "
            f"| {cpu['members']:.1f} | {cpu['gateways']:.1f} | {projected} |"
        )
    return lines


def reached(rows: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the bytes are as few as they should be, at every rate, and nothing had to be repaired."""
    small = all(row["fewer"] >= TO_REACH.get(row["steps"], 0.0) for row in rows)
    return small and not any(row["repaired"] for row in rows)
