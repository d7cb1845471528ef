"""Measure the machine that this process runs on: `python -m hetrl.runtime.instruments.profile`, by `hetrl profile`.

stdout has one JSON object per line, each as soon as it is known, so that whoever ends the process at a deadline keeps
what it has measured by then:

    {"device": "cpu" or "cuda", "machine": .., "software": .., "kinds": [..]}    first; device null where there is none
    {"begin": kind}, then any number of {"measurement": ..} and at most one {"skipped": {"kind": .., "why": ..}}
    {"done": true}                                                               last
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import torch

from hetrl.describe.measured import Measurement
from hetrl.runtime.instruments.kernels import all_reduces, copies, matmuls
from hetrl.runtime.instruments.layer import layers
from hetrl.runtime.instruments.timing import Repetitions
from hetrl.workload import architecture

FULL = Repetitions(warm_up=3, count=20, seconds=4.0)
QUICK = Repetitions(warm_up=1, count=5, seconds=0.5)
START_SECONDS = 300.0  # of a vLLM server: CUDA graphs are captured
_PACKAGES = ("hetrl", "torch", "megatron-core", "vllm")


@dataclass(frozen=True)
class Instrument:
    """One kind of measurement; `needs` is the package without which it is skipped."""

    kind: str
    run: Callable[[], Iterator[Measurement]]
    needs: str = "torch"


def steps(device: torch.device, model: str, quick: bool) -> tuple[Instrument, ...]:
    """Return what is measured, in order; quick leaves the engines out, whose starts take longer than all the rest."""
    how = QUICK if quick else FULL
    shape = architecture(model)
    kernels = (
        Instrument("matmul", lambda: matmuls(device, how)),
        Instrument("copy", lambda: copies(device, how)),
        Instrument("layer", lambda: layers(shape, device, how)),
        Instrument("all-reduce", lambda: all_reduces(device, how)),
    )
    if quick:
        return kernels
    return (
        *kernels,
        Instrument("megatron step", lambda: _training_steps(device, how), "megatron"),
        Instrument("vllm decode", lambda: _decoding(device, how), "vllm"),
    )


def _training_steps(device: torch.device, how: Repetitions) -> Iterator[Measurement]:
    from hetrl.runtime.instruments.engines import training_steps

    yield from training_steps(device, how)


def _decoding(device: torch.device, how: Repetitions) -> Iterator[Measurement]:
    from hetrl.runtime.instruments.engines import decoding

    yield from decoding(device, how, START_SECONDS)


def machine(device: torch.device) -> dict[str, str | int | float]:
    """Return what the machine is: host, device as its driver names it, how many, memory, processor cores."""
    found: dict[str, str | int | float] = {"host": platform.node(), "cores": psutil.cpu_count() or 1}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        memory = round(properties.total_memory / 1e9, 1)
        return {**found, "device": properties.name, "devices": torch.cuda.device_count(), "memory_gb": memory}
    memory = round(psutil.virtual_memory().total / 1e9, 1)
    return {**found, "device": f"{_processor()}, one thread", "devices": 1, "memory_gb": memory}


def _processor() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def software() -> dict[str, str]:
    """Return the versions of what was measured with."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    return found


def main() -> int:
    """Measure everything; what fails is a line that says why."""
    options = argparse.ArgumentParser(description="Measure this machine; JSON lines on stdout.")
    options.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    options.add_argument("--architecture", help="default: qwen3-8b on CUDA, qwen3-0.6b on a CPU")
    options.add_argument("--quick", action="store_true")
    asked = options.parse_args()
    out = _private_stdout()
    if asked.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the engines take a GPU where they see one
    kind = asked.device if asked.device != "auto" else ("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device("cuda:0" if kind == "cuda" else "cpu")
    torch.set_num_threads(1)  # the catalogue's `cpu` is one rank's share of a machine
    torch.manual_seed(0)

    def say(line: dict[str, Any]) -> None:
        print(json.dumps(line), file=out, flush=True)

    if kind == "cuda" and not torch.cuda.is_available():
        say({"device": None, "machine": machine(torch.device("cpu")), "software": software(), "kinds": []})
        return 0
    model = asked.architecture or ("qwen3-8b" if kind == "cuda" else "qwen3-0.6b")
    planned = steps(device, model, asked.quick)
    kinds = [step.kind for step in planned]
    say({"device": kind, "machine": machine(device), "software": software(), "kinds": kinds})
    for step in planned:
        _measure(step, device, say)
    say({"done": True})
    return 0


def _measure(step: Instrument, device: torch.device, say: Callable[[dict[str, Any]], None]) -> None:
    say({"begin": step.kind})
    if importlib.util.find_spec(step.needs) is None:
        say({"skipped": {"kind": step.kind, "why": f"{step.needs} is not installed"}})
        return
    try:
        for found in step.run():
            say({"measurement": asdict(found)})
    except Exception as error:  # one measurement that fails costs that measurement only
        reason = (str(error).splitlines() or [""])[0]
        say({"skipped": {"kind": step.kind, "why": f"{type(error).__name__}: {reason}".removesuffix(": ")}})
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _private_stdout() -> Any:
    """Return the stdout that we were given; what engines print to theirs goes to stderr from here on."""
    sys.stdout.flush()
    private = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return private


if __name__ == "__main__":
    sys.exit(main())
