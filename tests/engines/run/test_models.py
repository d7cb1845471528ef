"""A directory with another model than the planned one is refused before anything is built."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetrl.errors import UsageError
from hetrl.runtime.run.engines import check_model
from hetrl.workload import architecture_from_hf_config
from tests.engines.megatron.megatron_worlds import model_config

PLACE = Path("/models/x")


def test_the_planned_model_is_taken_whatever_pads_its_vocabulary() -> None:
    planned = architecture_from_hf_config(model_config(), "x")
    check_model(model_config(), planned, 64, PLACE)
    check_model(model_config(vocab_size=192), planned, 64, PLACE)


@pytest.mark.parametrize("change", [{"num_hidden_layers": 5}, {"hidden_size": 128}, {"intermediate_size": 64}])
def test_another_model_is_refused(change: dict[str, int]) -> None:
    planned = architecture_from_hf_config(model_config(), "planned")
    with pytest.raises(UsageError, match="/models/x: config.json has .* the plan is for planned"):
        check_model(model_config(**change), planned, 64, PLACE)


def test_sequences_beyond_its_positions_are_refused() -> None:
    planned = architecture_from_hf_config(model_config(), "x")
    with pytest.raises(UsageError, match="max_position_embeddings is 64, a sequence may have 65 tokens"):
        check_model(model_config(), planned, 65, PLACE)
