"""Unequal layers and samples for a uniform grid over unequal GPUs: what a system that knows their speed makes of it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import TypeVar

from hetrl.cost.formulas import split_layers
from hetrl.cost.generation import Server, batch_limit, replica_seconds, server_of
from hetrl.cost.memory import training_footprint
from hetrl.cost.stages import model_of, place_all, stage_shape
from hetrl.plan.plan import Replica, Stage, TaskPlan
from hetrl.problem import Problem
from hetrl.search.balance import balance
from hetrl.workload import ACTOR_GENERATION, INFERENCES, Workload, has_language_head

Worker = TypeVar("Worker", bound=Hashable)


def by_speed(name: str, task: TaskPlan, problem: Problem) -> TaskPlan | None:
    """Return the training task with layers by the stages' speed and samples by the replicas'; None: no such split fits.

    The layer split is one for all replicas (Megatron's grid), so a stage is as slow as its slowest replica there. It
    minimises the slowest stage, with the vocabulary's product as layers of the last one, within every stage's memory.
    """
    model = model_of(name, problem.workload)
    speeds = [[_flops(stage, problem) for stage in replica.stages] for replica in task.replicas]
    extra = _beside_layers(name, task, problem)
    room = [_most_layers(name, task, index, problem) for index in range(task.pipeline_parallel)]
    slowest = [min(column) for column in zip(*speeds, strict=True)]
    beside = [more / speed for more, speed in zip(extra, slowest, strict=True)]
    split = split_layers([1 / speed for speed in slowest], beside, room, model.layers)
    if not split:
        return None
    spans = list(pairwise(accumulate(split, initial=0)))
    replicas = tuple(
        Replica(replica.samples, tuple(Stage(s.devices, span) for s, span in zip(replica.stages, spans, strict=True)))
        for replica in task.replicas
    )
    return samples_by_speed(name, replace(task, replicas=replicas), problem)


def samples_by_speed(name: str, task: TaskPlan, problem: Problem, least: int = 1) -> TaskPlan:
    """Return the task with its samples divided so that its last replica ends as early as possible; the layers stay.

    Generation counts by its seconds at every batch, with the KV cache that its replicas have; inferences and trainings
    by the FLOP/s of their GPUs. Each replica gets at least so many units of samples, and is left out without any.
    """
    workload = problem.workload
    if name == ACTOR_GENERATION:
        shares = _rollout_samples(task, problem, least)
    elif name in INFERENCES:
        rate = [problem.model.rates(replica.devices[0]).training_flops for replica in task.replicas]
        shares = samples_by_rate(rate, workload.samples, 1, least)
    else:
        rate = _training_rates(name, task, problem)
        shares = samples_by_rate(rate, workload.samples, _sample_unit(task, workload), least)
    dealt = zip(shares, task.replicas, strict=True)
    return replace(task, replicas=tuple(replace(replica, samples=share) for share, replica in dealt if share))


def samples_by_rate(rate: Sequence[float], samples: int, unit: int, least: int = 0) -> list[int]:
    """Return the samples of each worker, in multiples of `unit`, so that the last one ends as early as possible."""
    return _samples_by_seconds(rate, lambda own, count: count / own, samples, unit, least)


def _samples_by_seconds(
    workers: Sequence[Worker], seconds: Callable[[Worker, int], float], samples: int, unit: int, least: int
) -> list[int]:
    """Return the samples of each worker as `samples_by_rate` does; `seconds` is how long one takes for so many."""
    kinds = list(dict.fromkeys(workers))
    tables = [[seconds(kind, count * unit) for count in range(1, samples // unit + 1)] for kind in kinds]
    shares = balance(tables, [workers.count(kind) for kind in kinds], samples // unit, least)
    left = [iter(share) for share in shares]
    return [next(left[kinds.index(own)]) * unit for own in workers]


def _rollout_samples(task: TaskPlan, problem: Problem, least: int) -> list[int]:
    workload, placed = problem.workload, place_all(ACTOR_GENERATION, task.replicas, problem.model)
    servers = [server_of(stages) for stages in placed]
    limits = [batch_limit(own, replica, workload) for own, replica in zip(servers, task.replicas, strict=True)]
    shape = (workload.prompt_tokens, workload.samples_per_prompt, workload.response)

    def seconds(worker: tuple[Server, int], count: int) -> float:
        server, limit = worker
        return replica_seconds(server, count, limit, *shape, workload.staleness, workload.samples).whole

    workers = list(zip(servers, limits, strict=True))
    return _samples_by_seconds(workers, seconds, workload.samples, workload.samples_per_prompt, least)


def _training_rates(name: str, task: TaskPlan, problem: Problem) -> list[float]:
    """Return the speed of each replica, that of its slowest stage, in layers times FLOP/s."""
    extra = _beside_layers(name, task, problem)
    return [
        1
        / max(
            (stage.layers[1] - stage.layers[0] + more) / _flops(stage, problem)
            for stage, more in zip(replica.stages, extra, strict=True)
        )
        for replica in task.replicas
    ]


def _beside_layers(name: str, task: TaskPlan, problem: Problem) -> list[float]:
    """Return what each stage computes beside its layers, in layers: the last one multiplies with the vocabulary."""
    model = model_of(name, problem.workload)
    head = model.head_parameters / model.layer_matrix_parameters if has_language_head(name) else 0.0
    return [0.0] * (task.pipeline_parallel - 1) + [head]


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
