"""What can be planned for but not run: said before anything is planned or started."""

from __future__ import annotations

from pathlib import Path

from hetrl.describe.experiment import Experiment
from hetrl.errors import UsageError
from hetrl.runtime.data.prompts import open_source
from hetrl.runtime.data.rewards import rule_of
from hetrl.runtime.weights.model_directory import TINY


def check_runnable(experiment: Experiment) -> None:
    """Raise UsageError that names the key of an experiment that this runtime cannot run, and what it can."""
    algorithm = experiment.algorithm
    if algorithm.kind != "grpo":
        raise UsageError(f'algorithm.kind: "{algorithm.kind}" can be planned for but not run yet; use grpo')
    if experiment.reward.kind != "rule":
        raise UsageError(f'reward.kind: "{experiment.reward.kind}" can be planned for but not run yet; use rule')
    model = experiment.model
    is_directory = (Path(model.architecture) / "config.json").is_file()
    if model.weights is None and model.architecture != TINY and not is_directory:
        raise UsageError(
            f"model.weights: {model.architecture} is only a shape here; give the directory with its config.json, "
            "tokenizer and safetensors, at the same path at every site"
        )
    if experiment.warm_start is not None and rule_of(experiment.reward, experiment.data) == "math":
        raise UsageError(
            "warm_start: it imitates bare answers, and reward.rule math reads only an answer that is stated as such "
            "(\\boxed{..} or #### ..); leave warm_start out, or set reward.rule: exact"
        )
    open_source(experiment.data)
