"""An iteration's only step: against the step's own log-probs it does what it does against those of a pass."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from hetrl.runtime.wire import LossSettings
from tests.engines.megatron.megatron_worlds import ADAM, LAYOUTS, Job, Worlds, assert_same, model_config, token_batch


@pytest.mark.parametrize("layout", ["one", "data-pipeline", "tensor-pipeline"])
def test_a_step_does_not_depend_on_who_computed_the_old_log_probs(worlds: Worlds, layout: str) -> None:
    batch, settings = token_batch(), LossSettings(kl_coefficient=0.1, temperature=0.8)
    given = {name: array for name, array in batch.extras.items() if name != "old_logprobs"}
    job = Job(model_config(), LAYOUTS[layout], batch, settings, 1, ADAM, temperature=0.8)
    own = worlds.outcome(
        replace(job, batch=replace(batch, extras=given), settings=msgspec.structs.replace(settings, first_step=True))
    )
    scored = worlds.outcome(replace(job, batch=replace(batch, extras={**given, "old_logprobs": own.scores})))
    assert own.metrics[0]["ratio"] == 1.0 and own.metrics[0]["logprob_difference"] == 0.0
    assert scored.metrics[0] == pytest.approx(own.metrics[0], rel=1e-5, abs=1e-6)
    assert_same(own.gradients, scored.gradients, 1e-6)
    assert_same(own.exported, scored.exported, 1e-5)
    assert any((own.exported[name] != own.loaded[name]).any() for name in own.exported)
