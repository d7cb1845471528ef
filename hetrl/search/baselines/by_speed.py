"""Unequal layers and samples for a uniform grid over unequal GPUs: what a system that knows their speed makes of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

from hetrl.cost.compute import has_language_head
from hetrl.cost.formulas import split_layers
from hetrl.cost.memory import training_footprint
from hetrl.cost.stages import model_of, stage_shape
from hetrl.plan.plan import Replica, Stage, TaskPlan
from hetrl.problem import Problem
from hetrl.search.balance import balance
from hetrl.workload import Workload


def by_speed(name: str, task: TaskPlan, problem: Problem) -> TaskPlan | None:
    """Return the training task with layers by the stages' speed and samples by the replicas'; None: no such split fits.

    The layer split is one for all replicas (Megatron's grid), so a stage is as slow as its slowest replica there. It
    minimises the slowest stage, with the vocabulary's product as layers of the last one, within every stage's memory.
    """
    workload, model = problem.workload, model_of(name, problem.workload)
    speeds = [[_flops(stage, problem) for stage in replica.stages] for replica in task.replicas]
    stages = task.pipeline_parallel
    extra = [0.0] * stages
    extra[-1] = model.head_parameters / model.layer_matrix_parameters if has_language_head(name) else 0.0
    room = [_most_layers(name, task, index, problem) for index in range(stages)]
    slowest = [min(column) for column in zip(*speeds, strict=True)]
    beside = [more / speed for more, speed in zip(extra, slowest, strict=True)]
    split = split_layers([1 / speed for speed in slowest], beside, room, model.layers)
    if not split:
        return None
    spans = list(pairwise(accumulate(split, initial=0)))
    rate = [
        1 / max((layers + more) / speed for layers, more, speed in zip(split, extra, own, strict=True))
        for own in speeds
    ]
    shares = samples_by_rate(rate, workload.samples, _sample_unit(task, workload), least=1)
    replicas = tuple(
        Replica(share, tuple(Stage(s.devices, span) for s, span in zip(replica.stages, spans, strict=True)))
        for share, replica in zip(shares, task.replicas, strict=True)
    )
    return replace(task, replicas=replicas)


def samples_by_rate(rate: Sequence[float], samples: int, unit: int, least: int = 0) -> list[int]:
    """Return the samples of each worker, in multiples of `unit`, so that the last one ends as early as possible."""
    kinds = list(dict.fromkeys(rate))
    tables = [[n / kind for n in range(1, samples // unit + 1)] for kind in kinds]
    shares = balance(tables, [rate.count(kind) for kind in kinds], samples // unit, least)
    left = [iter(share) for share in shares]
    return [next(left[kinds.index(own)]) * unit for own in rate]


def _flops(stage: Stage, problem: Problem) -> float:
    return min(problem.model.rates(device).training_flops for device in stage.devices)


def _most_layers(name: str, task: TaskPlan, index: int, problem: Problem) -> int:
    """Return how many layers fit in a stage while the task is alone.

    What it holds, with activations or in the update, is the larger of two lines: one leads at few, one at many layers.
    """
    most = []
    many = model_of(name, problem.workload).layers
    for rates in {problem.model.rates(replica.stages[index].devices[0]) for replica in task.replicas}:
        shape = stage_shape(name, task.replicas[0], index, rates, problem.workload)
        for start in (1, many):
            here, next_gb = (
                training_footprint(replace(shape, layers=layers), task, index, problem.workload).total_gb
                for layers in (start, start + 1)
            )
            most.append(start + int((rates.usable_gb - here) // (next_gb - here)))
    return min(most)


def _sample_unit(task: TaskPlan, workload: Workload) -> int:
    """Return one micro-batch of every minibatch where there are enough of those for all replicas, else one."""
    unit = task.micro_batch * max(workload.optimizer_steps_per_iteration // workload.epochs, 1)
    return unit if workload.samples % unit == 0 and workload.samples // unit >= len(task.replicas) else task.micro_batch
