"""Which model each task of an experiment computes, and what it starts from."""

from __future__ import annotations

from hetrl.describe.experiment import Experiment, Model
from hetrl.workload import CRITIC_INFERENCE, CRITIC_TRAINING, REWARD_INFERENCE

CRITICS = (CRITIC_INFERENCE, CRITIC_TRAINING)


def critic_of(experiment: Experiment) -> Model:
    """Return the critic: of its own weights, the reward model's, or the actor's where it has the same architecture."""
    critic, actor, weights = experiment.critic, experiment.model, experiment.critic.weights
    if critic.start == "reward":
        weights = experiment.reward.weights
    elif weights is None and experiment.critic_architecture == actor.architecture:
        weights = actor.weights
    return actor.model_copy(update={"architecture": experiment.critic_architecture, "weights": weights})


def reward_model_of(experiment: Experiment) -> Model:
    """Return the reward model of an experiment that has one."""
    reward = experiment.reward
    return experiment.model.model_copy(update={"architecture": reward.architecture, "weights": reward.weights})


def model_of(experiment: Experiment, task: str) -> Model:
    """Return the model of a task: the actor's own, its reference being the same at the start."""
    if task in CRITICS:
        return critic_of(experiment)
    return reward_model_of(experiment) if task == REWARD_INFERENCE else experiment.model
