"""The ratio of a whole sequence does not depend on how sequences are packed, and dealt to replicas and stages."""

from __future__ import annotations

import pytest

from hetrl.runtime.wire import LossSettings
from tests.engines.megatron.megatron_worlds import ADAM, LAYOUTS, Job, Worlds, assert_same, model_config, token_batch


@pytest.mark.parametrize("layout", ["data-pipeline", "tensor-pipeline"])
def test_every_layout_takes_the_step_of_one_rank(worlds: Worlds, layout: str) -> None:
    settings = LossSettings(ratio="sequence", kl_coefficient=0.1)
    one, other = (
        worlds.outcome(Job(model_config(), LAYOUTS[name], token_batch(), settings, 1, ADAM)) for name in ("one", layout)
    )
    assert one.metrics[0]["ratio"] != 1.0
    assert other.metrics[0] == pytest.approx(one.metrics[0], rel=1e-5, abs=1e-6)
    assert_same(one.gradients, other.gradients, 1e-5)
