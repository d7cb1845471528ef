"""PPO on one device: a run of it that is killed goes on exactly, and every other plan gives what it gives."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import psutil
import pytest
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from hetrl.plan.plan import IDLE_STATES, RECOMPUTES, SHARDINGS
from hetrl.problem import read_problem
from hetrl.workload import ACTOR_GENERATION, TRAININGS
from lab.planned.copies import Copies
from lab.planned.random_plans import plan_on_one_device, write_experiment
from lab.planned.runs import PlannedRuns, as_weights
from tests.runs import Finished, Submitted, processes_of, started, submitted

STEPS, EVERY_STEPS, KILLED_AFTER = 5, 2, 3
MODES = ("sync", "async")
SEEDS = range(74, 82)  # plans of PPO, which has all tasks, half of them in each mode; the benchmark `plans` has 60
SERVERS = 2  # they take the longest to start


@dataclass(frozen=True)
class Whole:
    """An experiment, its plan on one device, and its run from a supervised start to its end."""

    config: Path
    plan: Path
    run: Finished


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    work = tmp_path_factory.mktemp("whole")
    config, plan = lasting(write_experiment(work / "experiment", "sync", kind="ppo")), work / "plan.json"
    plan.write_text(json.dumps(plan_on_one_device(read_problem(config)).to_json()))
    with submitted(config, work, "--plan", str(plan), "--yes") as run:
        finished = run.finish()
    assert finished.code == 0, finished.stderr
    return Whole(config, plan, finished)


def test_a_run_that_was_killed_goes_on_exactly(whole: Whole, tmp_path: Path) -> None:
    """Actor and critic, a reference that keeps the weights of a warm start, a reward model; samples by their seeds."""
    with submitted(whole.config, tmp_path, "--plan", str(whole.plan), "--yes") as run:
        run.until("step", KILLED_AFTER)
        broken = run.directory
        kill(run)
    with started(tmp_path, "resume", broken.name, "--yes") as run:
        resumed = run.finish()
    assert resumed.code == 0, resumed.stderr
    assert "goes on after step 2" in resumed.stdout + resumed.stderr
    assert resumed.directory != broken

    rows, expected = resumed.rows(), whole.run.rows()
    assert [row["step"] for row in rows] == [*range(1, STEPS + 1)]
    for row, other in zip(rows, expected, strict=True):
        same = ("reward", "reward_model", "loss", "value_loss", "grad_norm", "kl", "weight_version", "critic_version")
        assert {name: row[name] for name in same} == {name: other[name] for name in same}
    served = {one["version"]: one["digest"] for one in whole.run.summary()["weight_versions"]}
    again = {one["version"]: one["digest"] for one in resumed.summary()["weight_versions"]}
    assert again == {version: served[version] for version in sorted(served)[-len(again) :]}
    assert len(again) == STEPS - EVERY_STEPS + 1
    exports_a_model(tmp_path)


def exports_a_model(work: Path) -> None:
    """The last run's newest checkpoint is listed as the one to go on from, and loads as a model with its tokenizer."""
    with started(work, "checkpoints", "--json") as listing:
        rows = json.loads(listing.finish().stdout)
    assert [(row["task"], row["step"]) for row in rows if row["next"]] == [
        ("actor_training", STEPS),
        ("critic_training", STEPS),
    ]
    with started(work, "export", listing.directory.name, "model") as exporting:
        assert exporting.finish().code == 0
    tokenizer = AutoTokenizer.from_pretrained(work / "model")
    model = AutoModelForCausalLM.from_pretrained(work / "model")
    tokens = tokenizer("3 7>", return_tensors="pt").input_ids
    assert model(tokens).logits.shape == (1, tokens.shape[1], model.config.vocab_size)


def lasting(config: Path) -> Path:
    """Let an experiment take some steps more, with a checkpoint every other step."""
    document = yaml.safe_load(config.read_text())
    document |= {"steps": STEPS, "checkpoints": {"every_steps": EVERY_STEPS}}
    config.write_text(yaml.safe_dump(document))
    return config


def kill(run: Submitted) -> None:
    """Kill the launcher and every process of a run, so that none has a last word."""
    run.kill()
    for process in processes_of(run.directory):
        with suppress(psutil.NoSuchProcess):
            process.kill()


@pytest.fixture(scope="module")
def weights(whole: Whole, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give weights that are sometimes right: those behind the supervised start."""
    start = whole.run.directory / "checkpoints" / "step-00000000"
    return as_weights(start, whole.config.parent / "model", tmp_path_factory.mktemp("start") / "weights")


@pytest.fixture(scope="module")
def runs(weights: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], PlannedRuns]]:
    @cache
    def runs_of(mode: str) -> PlannedRuns:
        reference = None if mode == "sync" else runs_of("sync").reference
        return PlannedRuns(copies, tmp_path_factory.mktemp(mode), mode, weights, "ppo", reference)

    with Copies() as copies:
        yield runs_of


@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_plan_gives_what_one_device_gives(runs: Callable[[str], PlannedRuns], seed: int) -> None:
    made = runs(MODES[seed % 2])
    assert made.disagreement(made.run(made.random_plan(seed, SERVERS))) == ""


def test_the_random_plans_have_together_all_that_plans_have(runs: Callable[[str], PlannedRuns]) -> None:
    plans = [runs(MODES[seed % 2]).random_plan(seed, SERVERS) for seed in SEEDS]
    assert {len(plan.groups) for plan in plans} == {1, 2, 3, 4}
    assert {len(plan.site_order) for plan in plans} == {2, 3}
    assert {plan.tasks[ACTOR_GENERATION].idle_state for plan in plans} == {*IDLE_STATES}
    for name in (ACTOR_GENERATION, *TRAININGS):
        tasks = [plan.tasks[name] for plan in plans]
        replicas = [replica for task in tasks for replica in task.replicas]
        assert {len(stage.devices) for replica in replicas for stage in replica.stages} == {1, 2}
        assert {len(replica.stages) for replica in replicas} == {1, 2}
        assert {1, 2} <= {len(task.replicas) for task in tasks}
    trainings = [plan.tasks[name] for plan in plans for name in TRAININGS]
    assert {task.idle_state for task in trainings} == {"resident", "offload"}
    assert {task.optimizer_sharding for task in trainings} == {*SHARDINGS}
    assert {task.recompute for task in trainings} == {*RECOMPUTES}
