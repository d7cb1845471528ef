"""Every experiment under configs/ reads, with the sites that it names, and says what the planner needs to know."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetrl.problem import read_problem

FOLDER = Path(__file__).parents[2] / "configs"
MEASURED = ("lab", "lab-training")  # their nodes are what discover finds: tests/slurm
CONFIGS = sorted(path for path in FOLDER.glob("*.yaml") if path.stem not in MEASURED)
REAL = ("gsm8k-qwen3-8b", "math-qwen2.5-7b", "gsm8k-llama-3.1-8b-ppo")


def test_the_real_examples_are_there() -> None:
    assert {*REAL, "quickstart"} <= {path.stem for path in CONFIGS}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_configuration_reads(path: Path) -> None:
    problem = read_problem(path)
    assert problem.experiment.name == path.stem
    assert problem.topology.devices
    workload = problem.workload
    assert workload.actor.name == problem.experiment.model.architecture
    assert workload.samples == problem.experiment.batch.samples


@pytest.mark.parametrize("name", REAL)
def test_a_real_example_says_where_weights_and_data_are(name: str) -> None:
    experiment = read_problem(FOLDER / f"{name}.yaml").experiment
    assert experiment.model.weights is not None
    assert experiment.data.path is not None
    assert experiment.data.instruction or experiment.data.system  # the model is told how to state its answer
