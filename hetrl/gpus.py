"""The catalogue of GPU types, and those that a site's file describes.

`gbps` is 1e9 bits per second in one direction, `gb_per_s` 1e9 bytes per second; 1 GB is 1e9 bytes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from typing import Any

import yaml

from hetrl.errors import UsageError, unknown

PHASES = ("decode", "prefill", "training")  # in which a GPU reaches different shares of its data sheet


@dataclass(frozen=True)
class GpuType:
    """One type of the GPU catalogue (`hetrl/catalogue`), or one that a site's file describes.

    A slice of a GPU (NVIDIA's Multi-Instance GPU, MIG) works alone: CUDA shows a process one of them, without
    peer-to-peer (Multi-Instance GPU User Guide, Deployment Considerations), and NCCL before 2.31 joins none.
    """

    name: str
    peak_tflops: float  # dense bf16 matrix product with fp32 accumulation, no sparsity
    memory_gb: float
    memory_gb_per_s: float
    peer_gbps: float  # GPU to GPU inside a node, one direction
    host_gbps: float  # GPU to host memory, one direction
    interconnect: str
    source: str  # the vendor's document
    usable_memory: float = 0.92  # what the driver, contexts and fragmentation leave of memory_gb
    like: str = ""  # a type of the catalogue that reaches the same shares of these figures, as far as anybody knows
    slice_of: str = ""  # the GPU that it is a slice of; empty: it is whole

    @property
    def usable_gb(self) -> float:
        """Return the memory that tasks may fill."""
        return self.memory_gb * self.usable_memory


@cache
def gpu_catalogue() -> Mapping[str, GpuType]:
    """Return the catalogue by name: the GPUs, then their slices."""
    whole = {name: GpuType(name=name, **entry) for name, entry in _read("gpus.yaml").items()}
    slices = (one for name, entry in _read("slices.yaml").items() for one in _slices(whole[name], entry))
    return {**whole, **{one.name: one for one in slices}}


def _read(file: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(resources.files("hetrl.catalogue").joinpath(file).read_text())
    return found


def _slices(gpu: GpuType, entry: Mapping[str, Any]) -> Iterator[GpuType]:
    """Yield the slices of a GPU, by their shares of what it has."""
    for profile, own in entry["profiles"].items():
        memory = own["memory"] / entry["memory"]
        yield replace(
            gpu,
            name=f"{gpu.name}-{profile}",
            peak_tflops=gpu.peak_tflops * own["sms"] / entry["sms"],
            memory_gb=gpu.memory_gb * memory,
            memory_gb_per_s=gpu.memory_gb_per_s * memory,
            peer_gbps=gpu.host_gbps * memory,  # what leaves a slice passes host memory
            host_gbps=gpu.host_gbps * memory,
            interconnect="host memory alone",
            source=f"NVIDIA Multi-Instance GPU User Guide; {gpu.source}",
            like=gpu.name,
            slice_of=gpu.name,
        )


def gpu_type(name: str, where: str = "") -> GpuType:
    """Return the catalogue's entry; raises UsageError that names the nearest known type, after `where`."""
    catalogue = gpu_catalogue()
    if name not in catalogue:
        # Nobody reads a list of all slices: those of the GPU that the name begins with are meant.
        known = [key for key, one in sorted(catalogue.items()) if name.startswith(one.slice_of)]
        raise UsageError(where + unknown("GPU type", name, known))
    return catalogue[name]


def words(name: str) -> frozenset[str]:
    """Return the words of a GPU's name, as drivers, Slurm and the catalogue give it: a100, 40gb."""
    return frozenset(re.findall(r"[a-z0-9]+", name.lower()))


def is_cpu(gpu: str) -> bool:
    """Return whether a catalogue type is a share of an ordinary machine, without any GPU."""
    return gpu.split("-")[0] == "cpu"


def check_described(one: GpuType) -> None:
    """Refuse a described type whose name the catalogue has, that means a CPU, or whose figures cannot be."""
    if one.name in gpu_catalogue() or is_cpu(one.name):
        raise UsageError(f'GPU type "{one.name}": the name is one of the catalogue; give it another')
    if one.like:
        gpu_type(one.like, f'GPU type "{one.name}": like: ')
    for key in ("peak_tflops", "memory_gb", "memory_gb_per_s", "peer_gbps", "host_gbps", "usable_memory"):
        check_number(f'GPU type "{one.name}": {key}', getattr(one, key))


def check_number(what: str, value: float, *, zero: bool = False) -> None:
    """Raise UsageError for what no measurement gives: nan, infinity, less than 0, or 0 itself unless it may be."""
    if not (math.isfinite(value) and (value > 0 or (zero and value == 0))):
        raise UsageError(f"{what} must be {'0 or more' if zero else 'more than 0'}, and finite, not {value:g}")
