"""Which model each task of an experiment computes, and what it starts from."""

from __future__ import annotations

from hetrl.describe.experiment import Experiment, Model
from hetrl.workload import CRITIC_INFERENCE, CRITIC_TRAINING, REWARD_INFERENCE

CRITICS = (CRITIC_INFERENCE, CRITIC_TRAINING)


def critic_of(experiment: Experiment) -> Model:
    """Return the critic: of its own architecture and weights, else those of the model that it starts from."""
    critic = experiment.critic
    start = reward_model_of(experiment) if critic.start == "reward" else experiment.model
    architecture = critic.architecture or start.architecture
    weights = critic.weights or (start.weights if architecture == start.architecture else None)
    return start.model_copy(update={"architecture": architecture, "weights": weights})


def reward_model_of(experiment: Experiment) -> Model:
    """Return the reward model of an experiment that has one."""
    reward = experiment.reward
    return experiment.model.model_copy(update={"architecture": reward.architecture, "weights": reward.weights})


def model_of(experiment: Experiment, task: str) -> Model:
    """Return the model of a task: the actor's own, its reference being the same at the start."""
    if task in CRITICS:
        return critic_of(experiment)
    return reward_model_of(experiment) if task == REWARD_INFERENCE else experiment.model
