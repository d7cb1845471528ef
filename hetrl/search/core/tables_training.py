"""The numbers of trainings per device class: times, parameters and memory, linear in what a layout chooses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hetrl.cost.compute import (
    StageShape,
    gradient_bytes,
    optimizer_seconds,
    product_seconds,
    weight_seconds,
)
from hetrl.cost.efficiency import Rates
from hetrl.cost.memory import embedding_bytes, kept_bytes, training_state_bytes, update_bytes, working_bytes
from hetrl.cost.model import PACKED
from hetrl.cost.network import slowest
from hetrl.cost.packing import DEALT, nearest, packing
from hetrl.cost.stages import Placed, model_of
from hetrl.cost.training import (
    activation_bytes,
    beside_products_seconds,
    longest_tokens,
    micro_batch_times,
)
from hetrl.plan.plan import RECOMPUTES
from hetrl.search.core.records import Flags1, Floats1, Floats2, Floats3, Floats5, Floats6, Ints1
from hetrl.search.space import Space, powers_of_two
from hetrl.workload import ACTOR_TRAINING, TRAININGS, Workload, has_language_head

MAX_STAGES = 8
MICRO_BATCH_TOKENS = 8192  # larger micro-batches gain nothing on a GPU
MAX_MICRO_BATCH = 64

Floats = npt.NDArray[np.float64]


class TrainingTables(NamedTuple):
    """Coefficients of the trainings; `[.., 2]` is (constant, per layer), the rest is said at each field.

    Axes as in `hetrl.search.core.tables`; f, l: whether the stage is the first, the last of its pipeline.
    """

    both: Floats6  # [t, c, k, r, l, 8] forward + backward: 1, layers, tokens, layers x tokens; then backward alone
    forward: Floats5  # [t, c, k, l, 8] forward only: products per token: 1, layers; reading the weights: 1, layers;
    # beside them: 1, layers, tokens, layers x tokens
    call: Floats1  # [c] fixed seconds of a forward pass over the batch
    scored: Flags1  # [t] whether such a pass comes ahead of the steps
    hop_bytes: Floats1  # [t] per token between two stages
    parameters: Floats5  # [t, k, f, l, 2] of one rank
    kept: Floats3  # [t, k, r] bytes per token in flight and layer
    working: Floats5  # [t, k, m, r, l] bytes beside what is kept
    embedding: Floats2  # [t, k] bytes on the first stage, beside what one micro-batch less keeps
    update: Floats2  # [c, 2] seconds of one optimiser step: constant, per parameter of a shard
    state_bytes: Floats1  # [2] per parameter: weights with gradients; optimiser
    update_bytes: float  # per parameter of a shard, during an update
    weight_bytes: float  # per parameter
    gradient_bytes: float  # per parameter, in the reduction
    packed: float  # share of the gradients' bytes that crosses links
    gathered: float  # share of the parameters' bytes that a sharded optimiser gathers over links
    tied_bytes: Floats1  # [t] of the second copy of a tied embedding, in a pipeline
    micro_batches: Ints1  # [m] sizes to choose from
    most_tensor: Ints1  # [t] largest k that divides heads and key-value heads
    samples: int
    steps: int  # optimiser steps per iteration
    minibatches: int
    longest: Floats1  # [n] expected tokens of the longest of n sequences
    place: Ints1  # [n] which packing is that of n samples
    per_sample: Floats2  # [m, place] micro-batches per sample
    fullest: Floats2  # [m, place] tokens of the fullest micro-batch over those of the mean one
    mean_tokens: float  # of a sequence
    max_tokens: float


def training_tables(space: Space) -> TrainingTables:
    """Return the numbers of all trainings of the workload, on all classes."""
    workload, shape = space.problem.workload, _shape(space, TRAININGS[0])
    rates = [space.problem.efficiencies.rates(kind.gpu) for kind in space.classes]
    sizes, steps = micro_batch_sizes(workload), workload.optimizer_steps_per_iteration
    gradient = gradient_bytes(workload.gradient_dtype, workload.weight_bytes)
    return TrainingTables(
        **_of_ranks(space, rates, sizes),
        **_of_dealing(workload, sizes),
        call=np.array([own.overhead.inference_call for own in rates]),
        scored=np.array([name == ACTOR_TRAINING and workload.scores_batch for name in workload.tasks]),
        update=np.array([_update(replace(shape, rates=own)) for own in rates]),
        state_bytes=np.array(training_state_bytes(shape, 1, workload.gradient_dtype)) / shape.parameters,
        update_bytes=update_bytes(shape, 1, workload.gradient_dtype) / shape.parameters,
        weight_bytes=float(workload.weight_bytes),
        gradient_bytes=float(gradient),
        packed=PACKED[gradient],
        gathered=space.problem.model.gathered[workload.weight_bytes],
        tied_bytes=np.array([_tied_bytes(name, workload) for name in workload.tasks]),
        micro_batches=np.array(sizes, np.int64),
        samples=workload.samples,
        steps=steps,
        minibatches=max(steps // workload.epochs, 1),
        mean_tokens=float(workload.sequence_tokens),
        max_tokens=float(workload.max_sequence_tokens),
    )


def _of_ranks(space: Space, rates: Sequence[Rates], sizes: Sequence[int]) -> dict[str, Any]:
    """Return the fields that are of a tensor-parallel rank: what it computes, holds and sends."""
    workload = space.problem.workload
    tasks, kinds, modes = len(workload.tasks), len(space.classes), len(RECOMPUTES)
    tensors = 1 + max(kind.gpus_per_node for kind in space.classes).bit_length()
    both, forward = np.zeros((tasks, kinds, tensors, modes, 2, 8)), np.zeros((tasks, kinds, tensors, 2, 8))
    parameters, kept = np.zeros((tasks, tensors, 2, 2, 2)), np.zeros((tasks, tensors, modes))
    working, embedding = np.zeros((tasks, tensors, len(sizes), modes, 2)), np.zeros((tasks, tensors))
    hop_bytes, most_tensor = np.zeros(tasks), np.zeros(tasks, np.int64)
    tokens = [float(size * workload.max_sequence_tokens) for size in sizes]
    for t, k, rank in _ranks(space, tensors):
        hop_bytes[t], most_tensor[t] = activation_bytes(rank, 1.0), k
        parameters[t, k], embedding[t, k] = _parameters(rank), embedding_bytes(rank)
        kept[t, k] = [kept_bytes(replace(rank, layers=1), 1, 1.0, mode) for mode in RECOMPUTES]
        working[t, k] = _working(replace(rank, layers=1), tokens)
        for kind, placed in _placed(space, rank, rates):
            both[t, kind, k] = _both(placed, workload)
            forward[t, kind, k] = _forward(placed, workload.attended_tokens)
    return {
        "both": both,
        "forward": forward,
        "hop_bytes": hop_bytes,
        "parameters": parameters,
        "kept": kept,
        "working": working,
        "embedding": embedding,
        "most_tensor": most_tensor,
    }


def _of_dealing(workload: Workload, sizes: Sequence[int]) -> dict[str, Any]:
    """Return the fields that say how sequences are dealt: `hetrl.cost.packing`, `longest_tokens`."""
    lengths, counts = (workload.response, workload.prompt_tokens), range(workload.samples + 1)
    packings = [[packing(*lengths, place, size) for place in range(len(DEALT))] for size in sizes]
    return {
        "longest": np.array([longest_tokens(workload, samples) for samples in counts]),
        "place": np.array([nearest(samples) for samples in counts]),
        "per_sample": np.array([[one.per_sample for one in row] for row in packings]),
        "fullest": np.array([[one.fullest for one in row] for row in packings]),
    }


def micro_batch_sizes(workload: Workload) -> list[int]:
    """Return the powers of two that divide the batch, up to `MICRO_BATCH_TOKENS` tokens."""
    limit = min(max(int(MICRO_BATCH_TOKENS / workload.max_sequence_tokens), 1), MAX_MICRO_BATCH)
    return [size for size in powers_of_two(limit) if workload.samples % size == 0]


def _shape(space: Space, name: str) -> StageShape:
    """Return a model without its layers, on one rank of the first class."""
    workload = space.problem.workload
    rates = space.problem.efficiencies.rates(space.classes[0].gpu)
    return StageShape(model_of(name, workload), 0, True, True, has_language_head(name), 1, rates, workload.weight_bytes)


def _tied_bytes(task: str, workload: Workload) -> float:
    model = model_of(task, workload)
    tied = model.tied_embeddings and has_language_head(task)
    return float(model.head_parameters * workload.weight_bytes if tied else 0)


def _ranks(space: Space, tensors: int) -> Iterator[tuple[int, int, StageShape]]:
    """Yield (t, k, `_shape` of one of 2^k tensor-parallel ranks) of the trainings, k rising; 2^k divides all heads."""
    for t, name in enumerate(space.problem.workload.tasks):
        if name in TRAININGS:
            shape = _shape(space, name)
            model = shape.architecture
            for k in range(tensors):
                if model.heads % (1 << k) == 0 and model.kv_heads % (1 << k) == 0:
                    yield t, k, replace(shape, tensor_parallel=1 << k)


def _placed(space: Space, rank: StageShape, rates: Sequence[Rates]) -> Iterator[tuple[int, Placed]]:
    """Yield (c, the rank with its peers on a node of class c), for the classes whose nodes hold them."""
    for kind, own in enumerate(space.classes):
        if rank.tensor_parallel <= own.gpus_per_node:
            peers = slowest(space.problem.topology, space.nodes[kind][0][: rank.tensor_parallel])
            yield kind, Placed(replace(rank, rates=rates[kind]), (), peers, None)


def _working(shape: StageShape, tokens: list[float]) -> Floats:
    """Return [m, r, l]: the working bytes of micro-batches of these sizes."""
    found = np.zeros((len(tokens), len(RECOMPUTES), 2))
    for m, r, last in product(range(len(tokens)), range(len(RECOMPUTES)), (0, 1)):
        found[m, r, last] = working_bytes(replace(shape, last=bool(last)), tokens[m], RECOMPUTES[r])
    return found


def _parameters(shape: StageShape) -> Floats:
    found = np.zeros((2, 2, 2))
    for first, last in product((0, 1), (0, 1)):
        empty, one = (replace(shape, layers=n, first=bool(first), last=bool(last)).parameters for n in (0, 1))
        found[first, last] = (empty, one - empty)
    return found


def _corners(shape: StageShape, costs: Callable[[StageShape, int], Sequence[float]]) -> Floats:
    """Return [l, 4 n]: for each of n costs of (stage with x layers, y), the coefficients of 1, x, y and x y.

    They are linear in x and in y, so their values at 0 and 1 layers, with y = 0 and one other, say all of them.
    """
    high = 4096  # tokens: as many as keep the digits of what one of them costs
    zero, up, right, corner = (
        np.array([costs(replace(shape, last=last, layers=layers), y) for last in (False, True)])
        for layers, y in product((0, 1), (0, high))
    )
    found = np.stack([zero, right - zero, (up - zero) / high, (corner - right - up + zero) / high], axis=-1)
    return found.reshape(2, -1)


@lru_cache(maxsize=200_000)  # classes of one GPU type, and the searches of one process, ask for the same
def _both(placed: Placed, workload: Workload) -> Floats:
    """Return [r, l, 8]; see `TrainingTables.both`."""

    def costs(recompute: str, stage: StageShape, tokens: int) -> tuple[float, float]:
        of_shape = replace(placed, shape=stage)
        times = micro_batch_times(of_shape, float(tokens), recompute, workload.attended_tokens)
        return times.both, times.backward

    return np.array([_corners(placed.shape, partial(costs, recompute)) for recompute in RECOMPUTES])


@lru_cache(maxsize=200_000)
def _forward(placed: Placed, sequence: float) -> Floats:
    """Return [l, 8]; see `TrainingTables.forward`."""
    found = np.zeros((2, 8))
    found[:, 4:] = _corners(placed.shape, lambda one, y: (beside_products_seconds(replace(placed, shape=one), y),))
    for last in (0, 1):
        none, one = (replace(placed.shape, last=bool(last), layers=layers) for layers in (0, 1))
        products = [product_seconds(stage, sequence) for stage in (none, one)]
        reading = [weight_seconds(stage) for stage in (none, one)]
        found[last, :4] = products[0], products[1] - products[0], reading[0], reading[1] - reading[0]
    return found


def _update(shape: StageShape) -> tuple[float, float]:
    """Return the constant and the seconds per parameter of a shard."""
    whole, half = optimizer_seconds(shape, 1), optimizer_seconds(shape, 2)
    return 2 * half - whole, 2 * (whole - half) / shape.parameters
