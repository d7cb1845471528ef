"""The catalogue of GPU types, and those that a site's file describes.

`gbps` is 1e9 bits per second in one direction, `gb_per_s` 1e9 bytes per second; 1 GB is 1e9 bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources

import yaml

from hetrl.errors import UsageError, unknown

PHASES = ("decode", "prefill", "training")  # in which a GPU reaches different shares of its data sheet


@dataclass(frozen=True)
class GpuType:
    """One entry of the GPU catalogue (`hetrl/catalogue/gpus.yaml`), or a type that a site's file describes."""

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

    @property
    def usable_gb(self) -> float:
        """Return the memory that tasks may fill."""
        return self.memory_gb * self.usable_memory


@cache
def gpu_catalogue() -> Mapping[str, GpuType]:
    """Return the catalogue by name."""
    text = resources.files("hetrl.catalogue").joinpath("gpus.yaml").read_text()
    return {name: GpuType(name=name, **entry) for name, entry in yaml.safe_load(text).items()}


def gpu_type(name: str, where: str = "") -> GpuType:
    """Return the catalogue's entry; raises UsageError that names the nearest known type, after `where`."""
    catalogue = gpu_catalogue()
    if name not in catalogue:
        raise UsageError(where + unknown("GPU type", name, sorted(catalogue)))
    return catalogue[name]


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
