"""The training engine of a task of a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hetrl.describe.models import CRITICS, model_of
from hetrl.errors import UsageError
from hetrl.plan.plan import TaskPlan
from hetrl.runtime.megatron.engine import MegatronEngine, OptimizerSettings
from hetrl.runtime.megatron.hf_weights import architecture_of, random_weights, with_scalar_head
from hetrl.runtime.megatron.layout import Layout
from hetrl.runtime.run.context import Context
from hetrl.runtime.weights.model_directory import ensure_model_directory
from hetrl.runtime.wire.members import World
from hetrl.workload import TRAININGS, Architecture, architecture, has_language_head


def layout_of(plan: TaskPlan) -> Layout:
    """Return the Megatron layout of a world of the plan."""
    return Layout(
        tensor=plan.tensor_parallel,
        stages=tuple(stage.layers for stage in plan.replicas[0].stages),
        samples=tuple(replica.samples for replica in plan.replicas),
        micro_batch=plan.micro_batch,
    )


def check_model(config: Mapping[str, Any], planned: Architecture, longest: int, where: Path) -> None:
    """Raise UsageError where a directory holds another model than the one that was planned for, or too short a one.

    `longest` are the tokens of the longest sequence. Vocabularies may differ by rows that pad them.
    """
    found = architecture_of(config)
    shapes = [(one.layers, one.hidden, one.heads, one.kv_heads, one.intermediate) for one in (found, planned)]
    if shapes[0] != shapes[1]:
        names = "layers, width, heads, key-value heads and feed-forward width"
        raise UsageError(
            f"{where}: config.json has {', '.join(map(str, shapes[0]))} as {names}; the plan is for {planned.name} "
            f"with {', '.join(map(str, shapes[1]))}: name the architecture of these weights, or the directory itself"
        )
    limit = config.get("max_position_embeddings")
    if limit is not None and longest > int(limit):
        raise UsageError(
            f"{where}: max_position_embeddings is {limit}, a sequence may have {longest} tokens; lower "
            "batch.prompt_tokens or batch.response_tokens, or take a model for longer texts"
        )


def build_engine(context: Context, world: World, rank: int) -> MegatronEngine:
    """Build the task's model with the experiment's first weights, in its world (collective)."""
    experiment, plan = context.experiment, world.plan
    model, scratch = model_of(experiment, world.task), context.directory / f"model-{world.task}"
    directory = ensure_model_directory(model, architecture(model.architecture), scratch)
    longest = experiment.batch.prompt_tokens + experiment.batch.response_tokens
    check_model(directory.config, architecture(model.architecture), longest, directory.path)
    scalar = not has_language_head(world.task)
    config = with_scalar_head(directory.config) if scalar else directory.config
    distributed = plan.optimizer_sharding == "data_parallel"
    rate = experiment.critic.learning_rate if scalar else experiment.algorithm.learning_rate
    settings = OptimizerSettings(rate, distributed=distributed, grad_reduce_in_fp32=plan.gradient_dtype == "fp32")
    engine = MegatronEngine(
        config,
        layout_of(plan),
        rank=rank,
        dtype="float32" if experiment.model.dtype == "fp32" else "bfloat16",
        optimizer=settings if world.task in TRAININGS else None,
        seed=experiment.seed,
        recompute=plan.recompute,
        recompute_layers=plan.stage_of(plan.rank_order()[rank]).recompute_layers,
        tokenizer=directory.path,
    )
    if directory.weights is not None:
        # A critic that starts from a language model has a head of its own; a reward model without one is none.
        engine.load_files(directory.weights, head_seed=model.seed if world.task in CRITICS else None)
    else:
        engine.load(random_weights(config, model.seed))
    return engine
