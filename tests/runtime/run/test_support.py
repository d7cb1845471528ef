"""What cannot be run is refused by name; what can is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from hetrl.describe.experiment import Experiment
from hetrl.errors import UsageError
from hetrl.runtime.run.support import check_runnable

QUICKSTART = yaml.safe_load((Path(__file__).parents[3] / "configs/quickstart.yaml").read_text())


PPO: dict[str, Any] = {"algorithm": {"kind": "ppo"}}
MODEL = {"kind": "model", "architecture": "tiny-qwen3", "weights": "/w"}


def changed(**sections: Any) -> Experiment:
    return Experiment.model_validate({**QUICKSTART, **sections})


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_the_quickstart_can_be_run(mode: str) -> None:
    check_runnable(changed(algorithm={**QUICKSTART["algorithm"], "mode": mode}))


@pytest.mark.parametrize(
    "sections",
    [
        PPO,
        {"reward": {**MODEL, "kind": "both"}},
        {**PPO, "critic": {"start": "reward"}, "reward": MODEL},
        {
            **PPO,
            "model": {"architecture": "qwen2.5-7b", "weights": "/a"},
            "critic": {"architecture": "qwen2.5-1.5b", "weights": "/c"},
        },
    ],
)
def test_ppo_and_reward_models_can_be_run(sections: dict[str, Any]) -> None:
    check_runnable(changed(**sections))


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"reward": {"kind": "model", "architecture": "qwen3-8b"}}, "reward.weights: a reward model that nobody"),
        ({**PPO, "critic": {"architecture": "qwen3-8b"}}, "critic.weights: qwen3-8b is only a shape"),
        ({**PPO, "critic": {"architecture": "qwen3-8b", "weights": "/w"}}, "critic: qwen3-8b has a vocabulary"),
        ({"model": {"architecture": "qwen3-8b"}}, "model.weights: qwen3-8b"),
        ({"data": {"kind": "math", "path": "/data/math"}}, "warm_start: it imitates bare answers"),
        ({"data": {"kind": "math"}, "warm_start": None}, "data.path: kind math needs"),
        (
            {"batch": {**QUICKSTART["batch"], "samples": 8192, "response_tokens": 32768}},
            "algorithm.minibatches: a minibatch of .* has 8.9 GB and goes as one message, which may have 4.3",
        ),
        (
            {
                "batch": {**QUICKSTART["batch"], "samples": 32768, "response_tokens": 32768},
                "algorithm": {**QUICKSTART["algorithm"], "minibatches": 16},
            },
            "batch.samples: a batch of 32768 samples .* has 8.6 GB",
        ),
    ],
)
def test_what_cannot_be_run_is_refused(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check_runnable(changed(**sections))
