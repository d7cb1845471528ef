"""What share of its data sheet a GPU reaches in each phase, and the fixed times that no data sheet has.

Efficiencies are per GPU type and phase, from published measurements (`_CALIBRATED`, sources beside each). A type or a
phase without a measurement is inferred, and `uncalibrated` lists it:

1. a phase that the type lacks while it has another one follows the A100's ratio between the two phases;
2. a type without any phase takes all of them from the nearest architecture that has points (`_NEAREST`), because the
   share that is lost (launches, power limit, memory controller) changes with the architecture more than with the board.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache

from hetrl.hardware import gpu_type

PHASES = ("decode", "prefill", "training")


@dataclass(frozen=True)
class Efficiency:
    """Shares of the data sheet: `decode` of the memory bandwidth, `prefill` and `training` of the matrix peak.

    `training` is the hardware utilisation (HFU): recomputed work counts as work; communication is not inside.
    """

    decode: float
    prefill: float
    training: float
    inferred: tuple[str, ...] = ()


# decode: Helix (ASPLOS'25) profile tables of one LLaMA-30B layer, 77-83 % on A100-40 and L4; on A100-80 the two rows of
# the Qwen2.5 speed benchmark (5.45 and 21.6 ms per token for 3.09 and 27.98 GB read) solve to 0.76 and 3.5 ms fixed.
# prefill: the same Helix tables, 16.1 TFLOP in 67 ms and 10.4 TFLOP in 203 ms; A100-80: Vidur profile tables (0.81).
# training: llm-foundry (MPT on A100-40, MFU 0.44-0.58 with FSDP), llmq README (Qwen2.5 on L40S, 0.37-0.49).
_CALIBRATED: dict[str, dict[str, float]] = {
    "a100-40gb": {"decode": 0.80, "prefill": 0.77, "training": 0.55},
    "a100-80gb": {"decode": 0.77, "prefill": 0.81},
    "l4": {"decode": 0.81, "prefill": 0.43},
    "l40s": {"training": 0.45},
    "cpu": {"decode": 0.50, "prefill": 0.50, "training": 0.50},
}
_ESTIMATES = ("cpu",)  # the catalogue's entry is itself an estimate: never called calibrated
_NEAREST = {
    "a100-hetrl": "a100-40gb",  # Ampere, GA100
    "a40": "a100-40gb",
    "a10g": "l4",  # a small board at a low power limit, like L4
    "l40": "l40s",  # Ada, AD102
    "rtx-4090": "l40s",
    "h100": "a100-80gb",  # HBM boards at full power
    "h200": "a100-80gb",
    "gh200": "a100-80gb",
    "h20": "a100-80gb",
    "v100": "a100-40gb",
}
_DEFAULT = "a100-40gb"


@dataclass(frozen=True)
class Overhead:
    """Seconds that do not shrink with the model: launches, schedulers, requests."""

    decode_step: float  # one step of the rollout engine: schedule, launch, sample, detokenise
    generation_call: float  # one batch of requests: HTTP, tokenisation, queue
    micro_batch: float  # forward and backward of one micro-batch on one stage: launches
    optimizer_step: float  # one optimiser step: gradient norm, launch, logging
    inference_call: float  # one forward pass over the batch of an iteration
    weight_version: float  # one version on one replica: pause, load, resume


# decode_step: the fixed part of the two Qwen2.5 rows on A100-80 (3.5 ms, vLLM 0.6.3) and of Llama-3.1-8B on A100-40
# (1.3 ms, vLLM 0.23). The others are estimates of launch and request times, small against any real model.
_GPU_OVERHEAD = Overhead(
    decode_step=0.003,
    generation_call=0.1,
    micro_batch=0.002,
    optimizer_step=0.02,
    inference_call=0.1,
    weight_version=0.2,
)
# A two-layer model of width 64 on two x86-64 cores that six processes share (megatron-core 0.16 on gloo, vLLM 0.32 for
# CPU), so that the predictions come near the medians of a quickstart: generation 0.17 s, training 0.07 s, sync 0.13 s.
_CPU_OVERHEAD = Overhead(
    decode_step=0.010,
    generation_call=0.120,
    micro_batch=0.030,
    optimizer_step=0.030,
    inference_call=0.030,
    weight_version=0.130,
)


@dataclass(frozen=True)
class Rates:
    """What one device really does: bytes and FLOPs per second of each phase, usable memory, fixed times."""

    decode_bytes: float
    prefill_flops: float
    training_flops: float
    memory_bytes_per_s: float
    host_bytes_per_s: float
    usable_gb: float
    overhead: Overhead


@cache
def efficiency(gpu: str) -> Efficiency:
    """Return the efficiencies of a catalogue type; `inferred` names the phases without a measurement."""
    if gpu in _ESTIMATES:
        return Efficiency(**_CALIBRATED[gpu], inferred=PHASES)
    if gpu not in _CALIBRATED:
        return replace(efficiency(_NEAREST.get(gpu, _DEFAULT)), inferred=PHASES)
    known, model = _CALIBRATED[gpu], _CALIBRATED[_DEFAULT]
    missing = tuple(phase for phase in PHASES if phase not in known)
    values = {phase: known.get(phase) or _by_ratio(phase, known, model) for phase in PHASES}
    return Efficiency(**values, inferred=missing)


def _by_ratio(phase: str, known: dict[str, float], model: dict[str, float]) -> float:
    """Scale a compute phase from the other one; memory-bound decode is alike on all boards and is taken over."""
    other = {"prefill": "training", "training": "prefill"}.get(phase)
    if other is None or other not in known:
        return model[phase]
    return min(model[phase] * known[other] / model[other], 0.95)


@cache
def rates(gpu: str) -> Rates:
    """Return the effective rates of a catalogue type (1e9-based units, one direction)."""
    entry, share = gpu_type(gpu), efficiency(gpu)
    return Rates(
        decode_bytes=entry.memory_gb_per_s * 1e9 * share.decode,
        prefill_flops=entry.peak_tflops * 1e12 * share.prefill,
        training_flops=entry.peak_tflops * 1e12 * share.training,
        memory_bytes_per_s=entry.memory_gb_per_s * 1e9,
        host_bytes_per_s=entry.host_gbps * 1e9 / 8,
        usable_gb=entry.memory_gb * entry.usable_memory,
        overhead=_CPU_OVERHEAD if gpu == "cpu" else _GPU_OVERHEAD,
    )


def uncalibrated(gpus: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Return, for each type with any, the phases whose efficiency is inferred."""
    return {gpu: efficiency(gpu).inferred for gpu in sorted(set(gpus)) if efficiency(gpu).inferred}
