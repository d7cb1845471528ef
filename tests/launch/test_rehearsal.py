"""What a rehearsal makes of an experiment, and of what came of it."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from hetrl.describe.experiment import Batch, Overlong, Reward
from hetrl.lengths import Lengths
from hetrl.problem import Problem, read_problem
from lab.lab import ROOT
from launch.rehearsal import MOST_TOKENS, MOST_WEIGHT_BYTES, WANTED_SECONDS, compare, document, rehearsed, settings_of
from launch.verbs.rehearse import table
from tests.plan.plan_cases import plan, topology, workload


def planned() -> tuple[Problem, float]:
    found = Problem(topology(), workload(), files=read_problem(ROOT / "configs/paper-multi-continent.yaml").files)
    return found, plan().predicted.iteration_seconds


def test_time_runs_so_fast_that_the_steps_take_what_somebody_waits_for() -> None:
    problem, seconds = planned()
    settings = settings_of(plan(), problem)
    assert settings.counted == 4 and settings.steps == 4 + 1 + 2 * 3, "what is drawn ahead under staleness 2"
    assert settings.steps * seconds / settings.emulation.speed == pytest.approx(WANTED_SECONDS, rel=0.05)
    assert settings_of(plan(), problem, steps=3, speed=7.0, noise=0.0).emulation.speed == 7.0


def test_a_version_of_the_weights_has_some_megabytes_whatever_the_model() -> None:
    problem, _ = planned()
    share = settings_of(plan(), problem).emulation.bytes_share
    assert share * problem.workload.actor.parameters * 2 == pytest.approx(MOST_WEIGHT_BYTES, rel=0.1)


def test_what_is_not_here_is_found_and_something_else_stands_in(tmp_path: Path) -> None:
    problem = read_problem(ROOT / "configs/paper-multi-continent.yaml")
    rehearsal, findings = rehearsed(problem, settings_of(plan(), planned()[0]), tmp_path)
    assert [line.split(":")[0] for line in findings] == ["model.weights", "data", "reward.weights", "critic.weights"]
    experiment = rehearsal.experiment
    assert experiment.launch.emulates and experiment.launch.executor == "local"
    assert Path(experiment.data.path or "").read_text().count("\n") > 100
    assert (experiment.model.architecture, experiment.reward.architecture) == ("qwen3-8b", "qwen3-8b")
    assert rehearsal.workload == problem.workload, "what the plan was made for"


def test_a_batch_that_one_process_would_hold_with_pains_has_tokens_that_count_as_several(tmp_path: Path) -> None:
    problem, _ = planned()
    files, reward = problem.files, Reward(kind="rule", overlong=Overlong(buffer_tokens=1000, penalty=1.0))
    assert files is not None

    def of(samples: int) -> Problem:
        batch = Batch(samples=samples, prompt_tokens=512, response_tokens=4096)
        experiment = files.experiment.model_copy(update={"batch": batch, "reward": reward})
        workload = replace(problem.workload, response=Lengths(4096, 4096))
        return replace(problem, workload=workload, files=replace(files, experiment=experiment))

    assert settings_of(plan(), of(128)).emulation.tokens_each == 1
    large = of(16384)
    assert settings_of(plan(), large, whole_texts=True).emulation.tokens_each == 1
    settings = settings_of(plan(), large)
    each = settings.emulation.tokens_each
    assert (each - 1) * MOST_TOKENS < 16384 * (512 + 4096) <= each * MOST_TOKENS
    rehearsal, _ = rehearsed(large, settings, tmp_path)
    short = rehearsal.experiment.batch
    assert each * short.prompt_tokens == pytest.approx(512, abs=each)
    assert each * short.response_tokens == pytest.approx(4096, abs=each)
    assert rehearsal.experiment.reward.overlong == Overlong(buffer_tokens=math.ceil(1000 / each), penalty=1.0)
    assert rehearsal.workload == large.workload, "what engines wait by"
    prompts = [json.loads(line)["prompt"] for line in (tmp_path / "prompts.jsonl").read_text().splitlines()]
    assert len({*prompts}) == len(prompts) >= rehearsal.experiment.prompts, "none of a batch is in a cache"
    assert {len(prompt) for prompt in prompts} == {short.prompt_tokens}


def test_what_is_here_is_taken_as_it_is_and_what_would_never_end_is_left_out(tmp_path: Path) -> None:
    problem = read_problem(ROOT / "configs/quickstart-ppo.yaml")
    rehearsal, findings = rehearsed(problem, settings_of(plan(), planned()[0]), tmp_path)
    assert [line.split(":")[0] for line in findings] == ["warm_start"]
    before, after = problem.experiment, rehearsal.experiment
    assert (after.model, after.data, after.reward) == (before.model, before.data, before.reward)
    assert after.warm_start is None and list(tmp_path.iterdir()) == []


def test_a_rehearsal_of_clusters_reaches_none_of_them(tmp_path: Path) -> None:
    problem = read_problem(ROOT / "configs/quickstart.yaml")
    assert problem.files is not None
    far = {"ssh": "login", "prefix": ("apptainer",), "relay": "relay.example.org:7443", "gateway_host": "10.0.0.1"}
    sites = tuple(site.model_copy(update=far) for site in problem.scenario.sites)
    scenario = problem.scenario.model_copy(update={"sites": sites})
    clusters = replace(problem, files=replace(problem.files, scenario=scenario))
    rehearsal, _ = rehearsed(clusters, settings_of(plan(), planned()[0]), tmp_path)
    for site in rehearsal.scenario.sites:
        assert (site.ssh, site.prefix, site.relay, site.gateway_host) == ("local", (), None, "127.0.0.1")
        assert site.site() == problem.topology.site_by_name[site.name]


def test_rehearsed_seconds_are_those_of_the_engines_in_the_steps_that_count() -> None:
    problem, seconds = planned()
    settings = settings_of(plan(), problem, steps=9, speed=10.0)
    rows = [{"seconds": {"iteration": 9.0}}] * 7 + [{"seconds": {"iteration": took}} for took in (2.0, 4.0)]
    compared = compare(rows, plan(), settings)
    assert (compared[-1].name, compared[-1].predicted, compared[-1].rehearsed) == ("iteration", seconds, 30.0)
    console = Console(file=StringIO(), width=120)
    console.print(table([replace(compared[-1], name="a [/x]")], settings))
    assert isinstance(console.file, StringIO) and "a [/x]" in console.file.getvalue()
    found = document(compared, settings, ["data: none"], "a-run", 12.34)
    assert found["tasks"]["iteration"] == {"predicted_seconds": seconds, "rehearsed_seconds": 30.0}
    assert (found["speed"], found["counted_steps"], found["wall_seconds"]) == (10.0, 2, 12.3)
