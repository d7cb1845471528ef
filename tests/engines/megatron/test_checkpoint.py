"""A run goes on from a checkpoint as if it had not stopped, on the layout that wrote it or on another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hetrl.runtime.checkpoints import files as checkpoint
from hetrl.runtime.megatron.hf_weights import iter_safetensors
from hetrl.runtime.wire import LossSettings
from tests.engines.megatron.megatron_worlds import (
    LAYOUTS,
    Job,
    Worlds,
    assert_same,
    message_of,
    model_config,
    start_engine,
    step_job,
    weights,
    written,
)

EXTRA = {"step": 2, "data": {"epoch": 0, "position": 16}, "name": "a run"}


@dataclass(frozen=True)
class Resumed:
    """What rank 0 saw after the step that follows a checkpoint."""

    extra: dict[str, Any]
    steps: int
    metrics: dict[str, float]
    exported: dict[str, torch.Tensor]
    random: torch.Tensor


def after_next_step(engine: Any, job: Job, extra: dict[str, Any]) -> Resumed:
    random = torch.rand(3)
    metrics = engine.train_step(job.batch, job.settings)
    return Resumed(extra, engine.steps, metrics, dict(engine.export()), random)


def stopped(rank: int, port: int, argument: tuple[Job, Path]) -> tuple[Resumed, dict[str, torch.Tensor]]:
    """Take the job's steps, save, and go on; return also the weights that were saved."""
    job, directory = argument
    engine = start_engine(rank, port, job)
    engine.load(weights(job.config))
    for _ in range(job.steps):
        engine.train_step(job.batch, job.settings)
    saved = dict(engine.export())
    engine.save(directory, EXTRA)
    after = after_next_step(engine, job, EXTRA)
    assert engine.finish_save()
    return after, saved


def resumed(rank: int, port: int, argument: tuple[Job, Path]) -> Resumed:
    """Take up a checkpoint in a process that never saw the weights, and go on."""
    job, directory = argument
    engine = start_engine(rank, port, job)
    return after_next_step(engine, job, engine.restore(directory))


Saved = Callable[[Job], tuple[Path, Resumed, dict[str, torch.Tensor]]]


@pytest.fixture(scope="module")
def saved(worlds: Worlds, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Give a function that returns a job's checkpoint, what follows it and its weights; each job runs once."""
    known: dict[str, tuple[Path, Resumed, dict[str, torch.Tensor]]] = {}

    def run(job: Job) -> tuple[Path, Resumed, dict[str, torch.Tensor]]:
        key = repr(replace(job, batch=None))
        if key not in known:
            directory = checkpoint.path_of(tmp_path_factory.mktemp("checkpoints"), 2)
            known[key] = (directory, *worlds.run(stopped, job.layout.world_size, (job, directory))[0])
        return known[key]

    return run


TIED, UNTIED = model_config(tie_word_embeddings=True), model_config()
CASES: dict[str, tuple[dict[str, Any], str, dict[str, Any], str, dict[str, Any]]] = {
    "tensor to pipeline": (TIED, "tensor", {}, "pipeline", {}),
    "tensor to three stages": (UNTIED, "tensor", {}, "three-stages", {}),
    "data to one": (TIED, "data", {}, "one", {}),
    "data to tensor-pipeline": (TIED, "data", {}, "tensor-pipeline", {}),
    "one to data-pipeline": (UNTIED, "one", {}, "data-pipeline", {}),
    "tensor-data to one, plain": (UNTIED, "tensor-data", {}, "one", {"distributed": False}),
    "tensor-pipeline, plain, to data": (TIED, "tensor-pipeline", {"distributed": False}, "data", {}),
    "data to pipeline": (TIED, "data", {}, "pipeline", {}),
    "a padded vocabulary": (model_config(vocab_size=127), "tensor", {}, "one", {}),
    "biases": (model_config("qwen2"), "data-pipeline", {}, "tensor", {}),
}


def job_of(config: dict[str, Any], layout: str, changes: dict[str, Any]) -> Job:
    job = step_job(config, LAYOUTS[layout], **changes)
    return replace(job, batch=replace(job.batch, tokens=job.batch.tokens % config["vocab_size"]))


@pytest.mark.parametrize("case", CASES)
def test_the_next_step_is_the_same_on_another_layout(worlds: Worlds, saved: Saved, case: str) -> None:
    config, source, source_changes, target, target_changes = CASES[case]
    directory, expected, _ = saved(job_of(config, source, source_changes))
    job = job_of(config, target, target_changes)
    ours = worlds.run(resumed, job.layout.world_size, (job, directory))[0]
    assert (ours.extra, ours.steps) == (EXTRA, 3)
    assert ours.metrics == pytest.approx(expected.metrics, rel=2e-5)
    assert_same(ours.exported, expected.exported, 1e-5)


@pytest.mark.parametrize(
    ("layout", "dtype"), [("data", "float32"), ("tensor-pipeline", "float32"), ("data", "bfloat16")]
)
def test_on_the_same_layout_the_next_step_has_the_same_bits(
    worlds: Worlds, saved: Saved, layout: str, dtype: str
) -> None:
    job = job_of(TIED, layout, {"dtype": dtype})
    directory, expected, _ = saved(job)
    ours = worlds.run(resumed, job.layout.world_size, (job, directory))[0]
    assert ours.metrics == expected.metrics
    assert torch.equal(ours.random, expected.random)
    assert_same(ours.exported, expected.exported, 0.0)


def test_bfloat16_models_keep_their_main_weights_on_another_layout(worlds: Worlds, saved: Saved) -> None:
    directory, _, exported = saved(job_of(TIED, "data", {"dtype": "bfloat16"}))
    main = written(directory, "weights")
    assert any(not torch.equal(main[name], tensor.float()) for name, tensor in exported.items())
    assert_same({name: tensor.bfloat16() for name, tensor in main.items()}, exported, 0.0)
    plain = job_of(TIED, "pipeline", {"dtype": "bfloat16", "distributed": False})
    again = directory.with_name("again")
    assert worlds.run(saved_again, 2, (plain, directory, again)) == [True, True]
    for kind in ("weights", "exp_avg", "exp_avg_sq"):
        assert_same(written(again, kind), written(directory, kind), 0.0)


def saved_again(rank: int, port: int, argument: tuple[Job, Path, Path]) -> bool:
    """Restore a checkpoint and save what was restored."""
    job, directory, again = argument
    engine = start_engine(rank, port, job)
    engine.save(again, engine.restore(directory))
    return bool(engine.finish_save())


def test_a_checkpoint_is_a_model_that_others_load(saved: Saved) -> None:
    directory, _, exported = saved(job_of(TIED, "tensor", {}))
    assert_same(dict(iter_safetensors(directory)), exported, 0.0)
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    loaded = model.state_dict()
    assert_same({name: loaded[name] for name in exported}, exported, 0.0)


def scored(rank: int, port: int, argument: tuple[Job, Path]) -> tuple[Any, dict[str, torch.Tensor]]:
    """Restore into an engine without optimiser and export."""
    job, directory = argument
    engine = start_engine(rank, port, job)
    return engine.restore(directory), dict(engine.export())


def test_an_engine_without_optimiser_takes_the_weights(worlds: Worlds, saved: Saved) -> None:
    directory, _, exported = saved(job_of(TIED, "tensor", {}))
    job = replace(job_of(TIED, "pipeline", {}), optimizer=None)
    extra, ours = worlds.run(scored, 2, (job, directory))[0]
    assert extra == EXTRA
    assert_same(ours, exported, 0.0)


def troubled(rank: int, port: int, argument: tuple[Job, Path, Path]) -> dict[str, str]:
    """Provoke each error of saving and restoring and return the messages."""
    job, directory, root = argument
    engine, messages = start_engine(rank, port, job), {}
    engine.load(weights(job.config))
    messages["not JSON"] = message_of(lambda: engine.save(root / "step-1", {"bad": object()}))
    messages["no place"] = message_of(lambda: engine.save(root / "file" / "step-1", {}))
    broken = root / ("step-3" if rank == 1 else directory)
    messages["one rank cannot read"] = message_of(lambda: engine.restore(broken))
    messages["then"] = message_of(lambda: engine.train_step(job.batch, LossSettings()))
    messages["good again"] = message_of(lambda: engine.restore(directory))
    return messages


def test_what_fails_on_one_rank_is_said_on_all(worlds: Worlds, saved: Saved, tmp_path: Path) -> None:
    job = job_of(TIED, "tensor", {})
    directory, _, _ = saved(job)
    (tmp_path / "file").write_text("")
    first, second = worlds.run(troubled, 2, (job, directory, tmp_path))
    expected = {"not JSON": "must be JSON", "then": "call load first", "good again": "no error"}
    for messages in (first, second):
        assert {name: text in messages[name] for name, text in expected.items()} == dict.fromkeys(expected, True)
    for messages in (first, second):
        assert "step-1: the checkpoint could not be written: [Errno 20]" in messages["no place"]
        assert "step-3: no checkpoint there" in messages["one rank cannot read"]
    assert first["one rank cannot read"].startswith("rank 1: ")
    assert list(tmp_path.glob("step-*")) == []


def refused(rank: int, port: int, argument: tuple[Job, Path]) -> str:
    """Return the error of a restore."""
    job, directory = argument
    engine = start_engine(rank, port, job)
    return message_of(lambda: engine.restore(directory))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (UNTIED, "missing: lm_head.weight"),
        (model_config(intermediate_size=64, tie_word_embeddings=True), "up_proj|gate"),
    ],
)
def test_the_checkpoint_of_another_model_is_refused(
    worlds: Worlds, saved: Saved, config: dict[str, Any], message: str
) -> None:
    directory, _, _ = saved(job_of(TIED, "tensor", {}))
    (found,) = worlds.run(refused, 1, (job_of(config, "one", {}), directory))
    assert any(part in found for part in message.split("|"))
