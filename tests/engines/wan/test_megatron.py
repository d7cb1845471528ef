"""Megatron-core as it is, over two sites: the same training as in a world of one site."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hetrl.runtime.wan.world import stop_wan_world
from tests.engines.megatron.megatron_worlds import LAYOUTS, Job, Worlds, assert_same, model_config, step_job, weights
from tests.engines.wan.wan_worlds import Sites, sites_of

_TWO = ("alpha/trainer/0", "beta/trainer/0")
_TWO_EACH = ("alpha/trainer/0", "alpha/trainer/1", "beta/trainer/0", "beta/trainer/1")


def _train(rank: int, port: int, argument: tuple[Sites, Job]) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    """Return the metrics of two steps and the weights after them, which rank 0 has."""
    from hetrl.runtime.megatron.engine import MegatronEngine

    sites, job = argument
    sites.join(rank, port)
    try:
        engine = MegatronEngine(
            job.config, job.layout, rank=rank, optimizer=job.optimizer, seed=0, timeout_seconds=60.0
        )
        engine.load(weights(job.config))
        metrics = [engine.train_step(job.batch, job.settings) for _ in range(job.steps)]
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
