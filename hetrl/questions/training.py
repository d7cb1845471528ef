"""Training of one model alone on equal GPUs: the best layout, and what one optimiser step of it takes.

for each offload, least first
  for tensor x pipeline x data parallel, sharding, recompute, micro-batch that the question leaves open
    keep those whose memory fits; the fastest is the answer
nothing fits in any: the layout that needs the least memory is the answer, and does not fit
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from itertools import product

from hetrl.cost.compute import forward_flops
from hetrl.errors import UsageError
from hetrl.gpus import gpu_type
from hetrl.questions.answer import Answer, positive, sources
from hetrl.questions.step import (
    OptimizerStep,
    Parallelism,
    SoloTraining,
    even_stages,
    memory_gb,
    one_site,
    step,
)

SHARDINGS = ("none", "optimizer", "full")
OFFLOADS = ("none", "optimizer", "all")
MICRO_BATCHES: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)


def training(asked: SoloTraining) -> Answer:
    """Return one optimiser step of the layout that the question names, or of the best legal one.

    Raises UsageError for numbers that are not positive, and where no layout is legal.
    """
    gpu_type(asked.gpu)
    positive(gpus=asked.gpus, sequence=asked.sequence, samples=asked.samples, micro_batch=asked.micro_batch)
    positive(tp=asked.tensor, pp=asked.pipeline, dp=asked.data, node_gpus=asked.node_gpus, nic_gbps=asked.nic_gbps)
    found = best_step(asked)
    if found is None:
        raise UsageError(
            f"no legal layout of {asked.gpus} GPUs with tp={asked.tensor or 'any'}, pp={asked.pipeline or 'any'}, "
            f"dp={asked.data or 'any'}: {'; '.join(_causes(asked))}"
        )
    (whole,) = even_stages(asked.architecture, asked.rates, 1, 1)
    flops = 3 * forward_flops(whole, asked.sequence) * found.tokens  # backward: twice the forward
    peak = gpu_type(asked.gpu).peak_tflops * 1e12 * asked.gpus
    return Answer(
        seconds=found.seconds,
        tokens=found.tokens,
        gpus=asked.gpus,
        breakdown={name: part for name, part in found.parts.items() if part > 0},
        memory_gb=found.memory_gb,
        usable_gb=asked.rates.usable_gb,
        **sources(asked.efficiencies, asked.gpu, "training"),
        details={**asdict(found.layout), "mfu": flops / peak / found.seconds},
    )


def best_step(asked: SoloTraining) -> OptimizerStep | None:
    """Return the fastest step that fits; where none does, the one with the least memory; None: no legal layout."""
    topology = one_site(asked.gpu, asked.gpus, asked.node_gpus, asked.nic_gbps)
    usable = asked.rates.usable_gb
    least: tuple[float, Parallelism] | None = None
    for offload in OFFLOADS if asked.offload is None else (asked.offload,):
        found = []
        for layout in _layouts(asked, offload):
            memory = memory_gb(asked, layout)
            if memory <= usable:
                found.append(step(asked, layout, topology))
            if least is None or memory < least[0]:
                least = (memory, layout)
        if found:
            return min(found, key=lambda one: one.seconds / one.tokens)
    return step(asked, least[1], topology) if least else None


def _layouts(asked: SoloTraining, offload: str) -> Iterator[Parallelism]:
    model = asked.architecture
    micro_batches = MICRO_BATCHES if asked.micro_batch is None else (asked.micro_batch,)
    if asked.samples is not None:
        micro_batches = tuple(size for size in micro_batches if size <= asked.samples)
    recomputes = ("none", "full") if asked.recompute is None else (asked.recompute,)
    shardings = SHARDINGS if asked.sharding is None else (asked.sharding,)
    for tensor, pipeline, data in grids(asked):
        if pipeline > model.layers or (asked.samples is not None and data > asked.samples):
            continue
        for sharding, recompute, size in product(shardings, recomputes, micro_batches):
            # Of one replica there is nothing to share out; full sharding takes the place of the other two.
            alone = sharding != "none" and data == 1 and asked.sharding is None
            mixed = sharding == "full" and _is_split(asked, tensor, pipeline)
            if alone or mixed or (pipeline > 1 and offload == "all"):
                continue
            yield Parallelism(tensor, pipeline, data, size, recompute, sharding, offload)


def _is_split(asked: SoloTraining, tensor: int, pipeline: int) -> bool:
    """Return whether layers or stages are split in a way that full sharding does not go with."""
    return pipeline > 1 or (tensor > 1 and asked.tensor is None)


def _causes(asked: SoloTraining) -> list[str]:
    """Return what rules out every layout of a question that has no legal one, as in `_layouts`."""
    model, samples = asked.architecture, asked.samples
    left = [grid for grid in grids(asked) if grid[1] <= model.layers]
    if not left:
        return [
            f"they must multiply to --gpus, tp must divide {model.heads} heads and {model.kv_heads} key-value heads "
            f"and fit a node of {asked.node_gpus}, pp at most {model.layers} layers"
        ]
    if samples is not None and asked.micro_batch is not None and asked.micro_batch > samples:
        return [f"--micro-batch {asked.micro_batch} is more than --samples {samples}; lower it, or raise --samples"]
    rules: dict[str, Callable[[int, int, int], bool]] = {
        f"--samples {samples} lets dp be {samples} at most": lambda _tensor, _pipeline, data: (
            samples is not None and data > samples
        ),
        "--offload all needs pp=1 (--offload optimizer does not)": lambda _tensor, pipeline, _data: (
            asked.offload == "all" and pipeline > 1
        ),
        "--sharding full needs pp=1, and tp=1 unless --tp says otherwise": lambda tensor, pipeline, _data: (
            asked.sharding == "full" and _is_split(asked, tensor, pipeline)
        ),
    }
    causes = []
    for cause, rules_out in rules.items():
        kept = [grid for grid in left if not rules_out(*grid)]
        causes += [cause] if len(kept) < len(left) else []
        left = kept
    return causes


def grids(asked: SoloTraining) -> Iterator[tuple[int, int, int]]:
    """Yield the legal (tensor, pipeline, data) of the question: they multiply to its GPUs."""
    model, degrees = asked.architecture, [2**power for power in range(4)]
    for tensor in degrees if asked.tensor is None else (asked.tensor,):
        legal = tensor <= asked.node_gpus and model.heads % tensor == 0 and model.kv_heads % tensor == 0
        for pipeline in (*degrees, 16) if asked.pipeline is None else (asked.pipeline,):
            data, rest = divmod(asked.gpus, tensor * pipeline)
            if legal and rest == 0 and data and asked.data in (None, data):
                yield tensor, pipeline, data
