"""A run whose processes were all killed goes on where its last checkpoint is, as if nothing had happened."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

import psutil
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from hetrl.problem import read_problem
from lab.planned.random_plans import plan_on_one_device, write_experiment
from tests.runs import Submitted, processes_of, started, submitted

STEPS, EVERY_STEPS, KILLED_AFTER = 5, 2, 3


def test_a_run_that_was_killed_goes_on_exactly(tmp_path: Path) -> None:
    """Actor and critic, a reference that keeps the weights of a warm start, a reward model; samples by their seeds."""
    config = lasting(write_experiment(tmp_path / "experiment", "sync", kind="ppo"))
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps(plan_on_one_device(read_problem(config)).to_json()))
    with submitted(config, tmp_path / "whole", "--plan", str(plan), "--yes") as run:
        whole = run.finish()
    assert whole.code == 0, whole.stderr

    work = tmp_path / "broken"
    with submitted(config, work, "--plan", str(plan), "--yes") as run:
        run.until("step", KILLED_AFTER)
        broken = run.directory
        kill(run)
    with started(work, "resume", broken.name, "--yes") as run:
        resumed = run.finish()
    assert resumed.code == 0, resumed.stderr
    assert "goes on after step 2" in resumed.stdout + resumed.stderr
    assert resumed.directory != broken

    rows, expected = resumed.rows(), whole.rows()
    assert [row["step"] for row in rows] == [*range(1, STEPS + 1)]
    for row, other in zip(rows, expected, strict=True):
        same = ("reward", "reward_model", "loss", "value_loss", "grad_norm", "kl", "weight_version", "critic_version")
        assert {name: row[name] for name in same} == {name: other[name] for name in same}
    served = {one["version"]: one["digest"] for one in whole.summary()["weight_versions"]}
    again = {one["version"]: one["digest"] for one in resumed.summary()["weight_versions"]}
    assert again == {version: served[version] for version in sorted(served)[-len(again) :]}
    assert len(again) == STEPS - EVERY_STEPS + 1
    exports_a_model(work)


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
