"""In which type gradients are kept and summed over the replicas."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hetrl.runtime.run.context import Context
from lab.quick import quick_plan
from tests.engines.megatron.megatron_worlds import (
    ADAM,
    LAYOUTS,
    Job,
    Worlds,
    model_config,
    start_engine,
    step_job,
    store_at,
    weights,
)
from tests.launch.launch_cases import quick_experiment, quick_gpus

Types = set[torch.dtype]


def types_of_a_step(rank: int, port: int, job: Job) -> tuple[Types, Types, bool]:
    """Return the types of the buffers that are reduced, those that Adam takes, and whether any stay after the step."""
    engine, taken = start_engine(rank, port, job), set()
    engine.load(weights(job.config))
    parameters = [parameter for group in engine.optimizer.param_groups for parameter in group["params"]]
    norm = engine.optimizer.get_grad_norm

    def watched() -> object:
        taken.update(parameter.grad.dtype for parameter in parameters if parameter.grad is not None)
        return norm()

    engine.optimizer.get_grad_norm = watched
    engine.train_step(job.batch, job.settings)
    left = any(parameter.grad is not None for parameter in parameters)
    buffers = {bucket.grad_data.dtype for buffer in engine.model.buffers for bucket in buffer.buckets}
    engine.close()
    return buffers, taken, left


def job_of(dtype: str, in_fp32: bool, distributed: bool) -> Job:
    settings = replace(ADAM, grad_reduce_in_fp32=in_fp32, distributed=distributed)
    return replace(step_in(dtype), optimizer=settings)


def step_in(dtype: str) -> Job:
    return step_job(model_config(), LAYOUTS["data"], dtype=dtype)


@pytest.mark.parametrize("distributed", [False, True])
@pytest.mark.parametrize(
    ("dtype", "in_fp32", "reduced"),
    [
        ("bfloat16", True, torch.float32),
        ("bfloat16", False, torch.bfloat16),
        ("float32", False, torch.float32),  # the gradients of a model in fp32 are in fp32 either way
    ],
)
def test_gradients_are_reduced_in_the_type_that_is_asked_for(
    worlds: Worlds, dtype: str, in_fp32: bool, reduced: torch.dtype, distributed: bool
) -> None:
    for found in worlds.run(types_of_a_step, 2, job_of(dtype, in_fp32, distributed)):
        assert found == ({reduced}, {torch.float32}, False)


def test_fp32_is_the_default(worlds: Worlds) -> None:
    for buffers, _, _ in worlds.run(types_of_a_step, 2, step_in("bfloat16")):
        assert buffers == {torch.float32}


def test_a_reduction_in_bf16_loses_only_its_last_digits(worlds: Worlds) -> None:
    exact, rounded = (worlds.outcome(job_of("bfloat16", in_fp32, True)) for in_fp32 in (True, False))
    differences = {
        name: float((rounded.gradients[name] - exact.gradients[name]).norm() / exact.gradients[name].norm())
        for name in exact.gradients
    }
    assert 0 < max(differences.values()) < 0.02
    assert rounded.agreed


def planned_types(rank: int, port: int, gradient_dtype: str) -> Types:
    """Return the types of the gradients' buffers in an engine that is built as a plan says."""
    from hetrl.runtime.megatron.engine import start_world
    from hetrl.runtime.run.engines import build_engine

    task = replace(quick_plan().tasks["actor_training"], gradient_dtype=gradient_dtype)
    plan = replace(quick_plan(), tasks={**quick_plan().tasks, "actor_training": task})
    experiment = quick_experiment(model={"architecture": "tiny-qwen3", "dtype": "bf16"})
    with tempfile.TemporaryDirectory() as root:
        context = Context(Path(root), "run", "alpha", "alpha", "", quick_gpus(plan), {}, experiment, plan)
        start_world(rank, 2, store_at(rank, port), 60.0, "cpu")
        engine = build_engine(context, context.worlds("actor_training")[0], rank)
    found = {buffer.grad_data.dtype for buffer in engine.model.buffers}
    engine.close()
    return found


@pytest.mark.parametrize(("gradient_dtype", "expected"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_the_plan_says_in_which_type(worlds: Worlds, gradient_dtype: str, expected: torch.dtype) -> None:
    assert worlds.run(planned_types, 2, gradient_dtype) == [{expected}] * 2
