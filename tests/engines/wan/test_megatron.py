"""Megatron-core as it is, over two sites: the same training as in a world of one site."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hetrl.runtime.checkpoints.files import read_state
from hetrl.runtime.megatron.layout import Layout
from hetrl.runtime.wan.world import stop_wan_world
from tests.engines.megatron.megatron_worlds import (
    LAYERS,
    LAYOUTS,
    Job,
    Worlds,
    assert_same,
    model_config,
    step_job,
    weights,
    written,
)
from tests.engines.wan.wan_worlds import LAYOUTS as SITES, Sites, engine_over, sites_of

_TWO = ("alpha/actor_training.rank/0", "beta/actor_training.rank/0")
_TWO_EACH = (
    "alpha/actor_training.rank/0",
    "alpha/actor_training.rank/1",
    "beta/actor_training.rank/0",
    "beta/actor_training.rank/1",
)


def _train(rank: int, port: int, argument: tuple[Sites, Job]) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    """Return the metrics of two steps, each before a sleep, and the weights after them, which rank 0 has."""
    sites, job = argument
    try:
        engine = engine_over(sites, rank, port, job)
        engine.load(weights(job.config))
        metrics = []
        for _ in range(job.steps):
            metrics.append(engine.train_step(job.batch, job.settings))
            engine.sleep(offload=True)
            engine.wake()
        exported = dict(engine.export())
        engine.close()
        return metrics, exported
    finally:
        stop_wan_world()


def _trained(worlds: Worlds, ranks: tuple[str, ...], backend: str, job: Job) -> Any:
    with sites_of(ranks, backend) as sites:
        return worlds.run(_train, len(ranks), (sites, job))[0]


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [(_TWO, "data"), (_TWO, "pipeline"), (_TWO_EACH, "tensor-data"), (_TWO_EACH, "tensor-pipeline")],
)
def test_training_over_two_sites_is_training_over_one(worlds: Worlds, ranks: tuple[str, ...], layout: str) -> None:
    job = step_job(model_config(), LAYOUTS[layout])
    expected_metrics, expected = _trained(worlds, ranks, "gloo", job)
    metrics, exported = _trained(worlds, ranks, "wan", job)
    assert_same(exported, expected, 1e-5)
    for over_sites, in_one in zip(metrics, expected_metrics, strict=True):
        assert over_sites == pytest.approx(in_one, rel=1e-4, abs=1e-6)


def _train_over(
    rank: int, port: int, argument: tuple[Sites, Job, bool]
) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    """Return the metrics of some steps and the weights, as `_train`; other weights come in between.

    With `whole`, every gather of parameters sends all values.
    """
    from hetrl.runtime.megatron.optimizer import gather_changes

    sites, job, whole = argument
    try:
        engine = engine_over(sites, rank, port, job)
        metrics = []
        for seed in range(2):
            engine.load(weights(job.config, seed))
            for _ in range(3):
                metrics.append(engine.train_step(job.batch, job.settings))
                if whole:
                    gather_changes(engine.model)
                engine.sleep(offload=True)
                engine.wake()
        exported = dict(engine.export())
        engine.close()
        return metrics, exported
    finally:
        stop_wan_world()


_FOUR_REPLICAS = Layout(1, LAYERS, (2, 2, 2, 2), 2)


@pytest.mark.parametrize(
    ("ranks", "layout", "dtype"),
    [(_TWO, LAYOUTS["data"], "bfloat16"), (_TWO, LAYOUTS["data"], "float32"), (_TWO_EACH, _FOUR_REPLICAS, "bfloat16")],
)
def test_gathering_changes_trains_as_gathering_all_and_sends_less(
    worlds: Worlds, ranks: tuple[str, ...], layout: Layout, dtype: str
) -> None:
    job = step_job(model_config(), layout, dtype=dtype)
    assert job.optimizer is not None
    job = replace(job, optimizer=replace(job.optimizer, learning_rate=1e-5))
    crossed: dict[bool, dict[str, int]] = {False: {}, True: {}}
    found = {}
    for whole, sent in crossed.items():
        with sites_of(ranks, "wan", sent) as sites:
            found[whole] = worlds.run(_train_over, len(ranks), (sites, job, whole))
    for (metrics, exported), (all_metrics, all_exported) in zip(found[False], found[True], strict=True):
        assert metrics == all_metrics
        assert_same(exported, all_exported, 0.0)
    assert all(sent < crossed[True][link] for link, sent in crossed[False].items())


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [(SITES["3x1"], "data-3"), (SITES["3x1"], "three-stages"), (SITES["2+1+1"], "data-pipeline")],
)
def test_training_over_three_sites_is_bit_equal_again_and_that_over_one_but_for_rounding(
    worlds: Worlds, ranks: tuple[str, ...], layout: str
) -> None:
    job = step_job(model_config(), {**LAYOUTS, "data-3": Layout(1, ((0, 4),), (4, 2, 2), 2)}[layout])
    (metrics, first), (again, second) = (_trained(worlds, ranks, "wan", job) for _ in range(2))
    assert metrics == again
    assert_same(first, second, 0.0)
    assert_same(first, _trained(worlds, ranks, "gloo", job)[1], 1e-5)


def _save(rank: int, port: int, argument: tuple[Sites, Job, Path]) -> bool:
    """Take a step and save; each site has a disk of its own."""
    sites, job, root = argument
    try:
        engine = engine_over(sites, rank, port, job)
        engine.load(weights(job.config))
        engine.train_step(job.batch, job.settings)
        engine.save(root / ("alpha" if rank < job.layout.world_size // 2 else "beta") / "step-1", {})
        engine.train_step(job.batch, job.settings)
        whole = engine.finish_save()
        engine.close()
        return whole
    finally:
        stop_wan_world()


def test_a_checkpoint_of_two_sites_is_whole_at_the_first(worlds: Worlds, tmp_path: Path) -> None:
    job = step_job(model_config(), LAYOUTS["tensor-data"])
    with sites_of(_TWO_EACH, "wan") as sites:
        assert worlds.run(_save, 4, (sites, job, tmp_path)) == [True] * 4
    assert [path.name for path in tmp_path.iterdir()] == ["alpha"]
    assert read_state(tmp_path / "alpha" / "step-1")["steps"] == 1
    for kind in ("exp_avg", "exp_avg_sq"):
        assert not any(tensor.isnan().any() for tensor in written(tmp_path / "alpha" / "step-1", kind).values())
