"""Keys of PPO and of reward models that do not fit together are refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from hetrl.describe.experiment import Experiment
from hetrl.describe.models import critic_of, model_of
from hetrl.problem import workload_of
from hetrl.workload import CRITIC_TRAINING, REWARD_INFERENCE
from lab.quickstart import QUICKSTART

KEYS = yaml.safe_load(QUICKSTART.read_text())
MODEL = {"kind": "model", "architecture": "qwen3-1.7b", "weights": "/r"}
PPO, OTHER = {"kind": "ppo"}, {"architecture": "qwen3-4b"}


def experiment(**sections: Any) -> Experiment:
    return Experiment.model_validate({**KEYS, **sections})


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"algorithm": {**PPO, "advantages": "rloo"}}, "advantages is for kind grpo, whose advantages are relative"),
        ({"algorithm": {**PPO, "advantage_std": "none"}}, "advantage_std is for kind grpo"),
        ({"algorithm": {"trace": 0.9}}, "trace is for kind ppo, which has a critic"),
        ({"algorithm": {"whiten_advantages": False}}, "whiten_advantages is for kind ppo"),
        ({"algorithm": {**PPO, "discount": 1.1}}, "discount"),
        ({"critic": {"learning_rate": 1e-3}}, "critic is for algorithm.kind ppo"),
        ({"algorithm": PPO, "critic": {"start": "reward"}}, "there is no reward model to start from"),
        ({"algorithm": PPO, "critic": {"start": "actor", "weights": "/c"}}, "give either weights or start"),
        (
            {"algorithm": PPO, "critic": {"start": "actor", "architecture": "qwen3-4b"}},
            "it starts from the actor, which",
        ),
        (
            {"algorithm": PPO, "reward": MODEL, "critic": {"start": "reward", "architecture": "qwen3-4b"}},
            "which is qwen3",
        ),
        ({"algorithm": PPO, "steps": 3, "critic": {"warmup_steps": 3}}, "trained in none of the 3 steps"),
        ({"reward": {"kind": "model"}}, "architecture goes with kind model or both"),
        ({"reward": {"kind": "rule", "weights": "/r"}}, "weights is of the reward model"),
        ({"reward": {"model_offset": 1.0}}, "model_offset is of the reward model"),
        ({"reward": {**MODEL, "rule_scale": 2.0}}, "rule_scale is for kind rule or both"),
        ({"reward": MODEL, "algorithm": {"dynamic_sampling": {"max_draws": 3}}}, "a reward model scores whole batches"),
    ],
)
def test_keys_that_do_not_fit_are_refused(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        experiment(**sections)


def test_the_critic_is_the_actors_size_unless_it_says_or_starts_otherwise() -> None:
    plain = experiment(algorithm=PPO, model={"architecture": "qwen3-8b", "weights": "/a"})
    assert (critic_of(plain).architecture, critic_of(plain).weights) == ("qwen3-8b", "/a")
    judged = experiment(algorithm=PPO, critic={"start": "reward"}, reward=MODEL)
    assert (critic_of(judged).architecture, critic_of(judged).weights) == ("qwen3-1.7b", "/r")
    own = experiment(algorithm=PPO, critic={"architecture": "qwen3-4b", "weights": "/c"}, reward=MODEL)
    assert (critic_of(own).architecture, critic_of(own).weights) == ("qwen3-4b", "/c")
    assert model_of(own, CRITIC_TRAINING) == critic_of(own)
    assert model_of(own, REWARD_INFERENCE).weights == "/r"
    for one, layers in ((plain, 36), (judged, 28), (own, 36)):
        critic = workload_of(one).critic
        assert critic is not None and critic.layers == layers


def test_a_critic_of_another_size_does_not_start_from_the_actor() -> None:
    one = experiment(
        algorithm=PPO, model={"architecture": "qwen3-8b", "weights": "/a"}, critic={"architecture": "qwen3-4b"}
    )
    assert critic_of(one).weights is None
