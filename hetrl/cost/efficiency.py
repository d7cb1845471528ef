"""What share of its data sheet a GPU reaches in each phase, and the fixed times that no data sheet has.

Three sources, the first that has a number wins:

    measured    on a machine of this type by `hetrl profile`; `with_measured` puts it before the others
    calibrated  `hetrl/catalogue/efficiencies.yaml`, which `hetrl calibrate` writes from the published points in
                `calibration_points.yaml`
    inferred    from the calibrated shares of other types (`hetrl.cost.inferred`); `uncalibrated` lists it
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from importlib import resources
from typing import Any

import yaml

from hetrl.cost.inferred import inferred_share
from hetrl.errors import UsageError, unknown
from hetrl.gpus import PHASES, GpuType, gpu_type, is_cpu
from hetrl.hardware import bytes_per_second

FILE = "efficiencies.yaml"


@dataclass(frozen=True)
class Efficiency:
    """Shares of the data sheet: `decode` of the memory bandwidth, `prefill` and `training` of the matrix peak.

    `training` is of the products alone, recomputed ones included; the traffic of activations and communication are
    counted beside them. `inferred` and `measured` name the phases of that source, the others are calibrated.
    """

    decode: float
    prefill: float
    training: float
    inferred: tuple[str, ...] = ()
    measured: tuple[str, ...] = ()


@dataclass(frozen=True)
class Overhead:
    """Seconds that do not shrink with the model: launches, schedulers, requests."""

    decode_step: float  # one step of the rollout engine: schedule, launch, sample, detokenise
    decode_sequence: float  # each running sequence of a decode step: schedule, sample, detokenise, send
    decode_all_reduce: float  # each all-reduce of a decode step beside its bytes: launch, ranks that wait for others
    generation_call: float  # one batch of requests: HTTP, tokenisation, queue
    layer: float  # the trainer's forward pass of one layer beside products and memory: its kernels' launches
    micro_batch: float  # forward and backward of one micro-batch on one stage: launches
    optimizer_step: float  # one optimiser step: gradient norm, launch, logging
    inference_call: float  # one forward pass over the batch of an iteration
    weight_version: float  # one version on one replica: pause, load, resume


PLANNED_ENGINE = "vllm-0.32"  # the release that runs
OURS = "hetrl"  # the trainer that runs: Megatron-core as `hetrl.runtime.megatron` puts it together
REFERENCE = "llm-foundry"  # the trainer with the most points; the others are relative to it
# Estimates of launch and request times, small against any real model; those of a decode step are fitted.
_GPU_OVERHEAD = Overhead(
    decode_step=0.0,
    decode_sequence=0.0,
    decode_all_reduce=0.0,
    generation_call=0.1,
    layer=0.0,
    micro_batch=0.002,
    optimizer_step=0.02,
    inference_call=0.1,
    weight_version=0.2,
)
# A two-layer model of width 64 on two x86-64 cores that six processes share (megatron-core 0.16 on gloo, vLLM 0.32 for
# CPU), so that the predictions come near the medians of a quickstart: generation 0.17 s, training 0.07 s, sync 0.13 s.
_CPU_OVERHEAD = Overhead(
    decode_step=0.010,
    decode_sequence=0.0,
    decode_all_reduce=0.0,
    generation_call=0.120,
    layer=0.0,
    micro_batch=0.030,
    optimizer_step=0.030,
    inference_call=0.030,
    weight_version=0.130,
)


@dataclass(frozen=True)
class Trainer:
    """What the code of a trainer makes of a GPU: rate of its products, relative to `REFERENCE`; `Overhead.layer`."""

    products: float = 1.0
    layer_seconds: float = 0.0


@dataclass(frozen=True)
class Engine:
    """What a release of the rollout engine makes of a GPU: seconds of `Overhead` per decode step and sequence in it.

    `prefill` is the share of the rate of a layer's products alone that whole prompts reach.
    """

    step_seconds: float
    sequence_seconds: float = 0.0
    prefill: float = 1.0


@dataclass(frozen=True)
class Rates:
    """What one device really does: bytes and FLOPs per second of each phase, usable memory, fixed times.

    `prefill_flops` is of one layer's products, of which whole prompts reach the share `prompts` on the rollout engine;
    `training_flops` is of the trainer, which also infers. `attention` is the share of it that attention's products
    reach, `activation_bytes_per_s` the rate of what the trainer moves beside all products.
    """

    decode_bytes: float
    prefill_flops: float
    prompts: float
    training_flops: float
    attention: float
    activation_bytes_per_s: float
    memory_bytes_per_s: float
    host_bytes_per_s: float
    usable_gb: float
    overhead: Overhead

    def __hash__(self) -> int:
        """Return a hash that reads two of the numbers only: rates are in the key of every remembered cost."""
        return hash((self.decode_bytes, self.training_flops))


@dataclass(frozen=True)
class Efficiencies:
    """The fitted numbers: shares per type and phase, what engine releases and trainers make of them.

    `engine_of` names the release that a type's points were measured with, `decode_all_reduce` are seconds of
    `Overhead`. Of training: `attention` is the share of the rate of products that attention reaches;
    `activation_traffic` scales the bytes that are moved beside products, `exposed` is the part of a sharded model's
    communication that compute does not hide. `measured` has shares that stand in for those of `shares` and for what is
    inferred from them, `given` rates of a type that stand in for what follows from its shares, `described` types that
    the catalogue does not have.
    """

    shares: Mapping[str, Mapping[str, float]]
    engines: Mapping[str, Engine]
    engine_of: Mapping[str, str] = field(default_factory=dict)
    decode_all_reduce: float = 0.0
    trainers: Mapping[str, Trainer] = field(default_factory=dict)
    attention: float = 1.0
    activation_traffic: float = 1.0
    exposed: float = 0.0
    measured: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    given: Mapping[str, Rates] = field(default_factory=dict)
    described: Mapping[str, GpuType] = field(default_factory=dict)

    def with_measured(self, shares: Mapping[str, Mapping[str, float]]) -> Efficiencies:
        """Return these with measured shares, {GPU type: {phase: share}}, before all others."""
        return replace(self, measured=shares)

    def with_rates(self, gpu: str, rates: Rates) -> Efficiencies:
        """Return these with other rates of a type: what one of them is worth."""
        return replace(self, given={**self.given, gpu: rates})

    def with_types(self, types: Iterable[GpuType]) -> Efficiencies:
        """Return these with types that the catalogue does not have; themselves where there are none."""
        found = {one.name: one for one in types}
        return replace(self, described=found) if found else self

    def _entry(self, gpu: str) -> GpuType:
        return self.described.get(gpu) or gpu_type(gpu)

    @cached_property
    def _known(self) -> dict[str, Rates]:
        return dict(self.given)

    def rates(self, gpu: str) -> Rates:
        """Return the effective rates of a catalogue type (1e9-based units, one direction)."""
        if gpu not in self._known:
            self._known[gpu] = self._rates(gpu)
        return self._known[gpu]

    def rates_under(self, gpu: str, trainer: str) -> Rates:
        """Return the rates of a type under another trainer than `OURS`; UsageError names the nearest known one."""
        rates, ours, other = self.rates(gpu), self._trainer(OURS), self._trainer(trainer)
        if trainer == OURS or is_cpu(gpu):
            return rates
        return replace(
            rates,
            training_flops=rates.training_flops * other.products / ours.products,
            overhead=replace(rates.overhead, layer=other.layer_seconds),
        )

    def rates_served(self, gpu: str, engine: str | None = None) -> Rates:
        """Return the rates of a type under a release of the rollout engine.

        Without one: the one that the type's points were measured with, else the planned one. Raises UsageError that
        names the nearest known release.
        """
        name = engine or self.engine_of.get(gpu, PLANNED_ENGINE)
        if name not in self.engines:
            raise UsageError(unknown("engine", name, sorted(self.engines)))
        rates, served = self.rates(gpu), self.engines[name]
        if is_cpu(gpu):
            return rates
        times = {"decode_step": served.step_seconds, "decode_sequence": served.sequence_seconds}
        return replace(rates, prompts=served.prefill, overhead=replace(rates.overhead, **times))

    def _rates(self, gpu: str) -> Rates:
        entry, share = self._entry(gpu), self.of(gpu)
        trainer, engine = self._trainer(OURS), self.engines[PLANNED_ENGINE]
        planned = replace(
            _GPU_OVERHEAD,
            decode_step=engine.step_seconds,
            decode_sequence=engine.sequence_seconds,
            decode_all_reduce=self.decode_all_reduce,
            layer=trainer.layer_seconds,
        )
        cpu = is_cpu(gpu)  # whose rates are estimates of these engines
        return Rates(
            decode_bytes=entry.memory_gb_per_s * 1e9 * share.decode,
            prefill_flops=entry.peak_tflops * 1e12 * share.prefill,
            prompts=1.0 if cpu else engine.prefill,
            training_flops=entry.peak_tflops * 1e12 * share.training * (1.0 if cpu else trainer.products),
            attention=self.attention,
            activation_bytes_per_s=entry.memory_gb_per_s * 1e9 / max(self.activation_traffic, 1e-9),
            memory_bytes_per_s=entry.memory_gb_per_s * 1e9,
            host_bytes_per_s=bytes_per_second(entry.host_gbps),
            usable_gb=entry.usable_gb,
            overhead=_CPU_OVERHEAD if cpu else planned,
        )

    def of(self, gpu: str) -> Efficiency:
        """Return the efficiencies of a catalogue type, and which of them are measured or inferred."""
        measured = self.measured.get(gpu, {})
        known = {**self.shares.get(gpu, {}), **measured}
        missing = tuple(phase for phase in PHASES if phase not in known)
        decode, prefill, training = (
            known.get(phase) or inferred_share(self.shares, self._entry(gpu), phase) for phase in PHASES
        )
        return Efficiency(decode, prefill, training, missing, tuple(phase for phase in PHASES if phase in measured))

    def _trainer(self, name: str) -> Trainer:
        if name in (REFERENCE, OURS):
            return self.trainers.get(name, Trainer())
        if name not in self.trainers:
            raise UsageError(unknown("trainer", name, sorted((REFERENCE, *self.trainers))))
        return self.trainers[name]

    def uncalibrated(self, gpus: Iterable[str]) -> dict[str, tuple[str, ...]]:
        """Return, for each type with any, the phases whose efficiency is inferred."""
        return {gpu: inferred for gpu in sorted(set(gpus)) if (inferred := self.of(gpu).inferred)}


@cache
def calibrated() -> Efficiencies:
    """Return the calibrated efficiencies, those of the file."""
    return parse(yaml.safe_load(resources.files("hetrl.catalogue").joinpath(FILE).read_text()))


def parse(document: Mapping[str, Any]) -> Efficiencies:
    """Return the fitted numbers of the parsed file."""
    training = document["training"]
    measured_on = {name: one["measured_on"] for name, one in document["engines"].items()}
    return Efficiencies(
        shares={gpu: dict(shares) for gpu, shares in document["shares"].items()},
        engines={
            name: Engine(one["step_seconds"], one["sequence_seconds"], one["prefill"])
            for name, one in document["engines"].items()
        },
        engine_of={gpu: name for name, gpus in measured_on.items() for gpu in gpus},
        decode_all_reduce=float(document["decode_all_reduce_seconds"]),
        trainers={name: Trainer(**one) for name, one in training["trainers"].items()},
        attention=float(training["attention"]),
        activation_traffic=float(training["activation_traffic"]),
        exposed=float(training["exposed_communication"]),
    )
