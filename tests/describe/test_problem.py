"""The experiment file: what it becomes, and what it says of a mistake."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml

from hetrl.describe.launching import seconds_of
from hetrl.describe.models import critic_of
from hetrl.errors import UsageError
from hetrl.problem import Problem, read_problem
from hetrl.workload import Lengths, architecture
from lab.lab import ROOT

SITE: dict[str, Any] = {"name": "alps", "nodes": [{"name": "n", "gpu": "a100-40gb", "gpus": 4}]}
BASE: dict[str, Any] = {
    "name": "try",
    "model": {"architecture": "qwen3-0.6b"},
    "algorithm": {"kind": "grpo", "samples_per_prompt": 8, "minibatches": 2, "kl_coefficient": 0.001},
    "data": {"kind": "larger-digit"},
    "batch": {"samples": 64, "prompt_tokens": 16, "response_tokens": 32},
    "steps": 3,
    "topology": {"sites": ["alps.yaml"]},
}


def changed(*location: str, to: object) -> dict[str, Any]:
    """Return the base experiment with one key set; `to=...` removes the key."""
    document = deepcopy(BASE)
    section = document
    for key in location[:-1]:
        section = section.setdefault(key, {})
    section[location[-1]] = to
    if to is ...:
        del section[location[-1]]
    return document


def read(tmp_path: Path, document: object) -> Problem:
    (tmp_path / "alps.yaml").write_text(yaml.safe_dump(SITE))
    (tmp_path / "try.yaml").write_text(yaml.safe_dump(document))
    return read_problem(tmp_path / "try.yaml")


def test_an_experiment_becomes_topology_and_workload(tmp_path: Path) -> None:
    problem = read(tmp_path, BASE)
    workload = problem.workload
    assert [device.id for device in problem.topology.devices] == [f"alps/n/{index}" for index in range(4)]
    assert workload.tasks == ("actor_generation", "reference_inference", "actor_training")
    assert (workload.samples, workload.samples_per_prompt, workload.prompt_tokens) == (64, 8, 16)
    assert workload.response == Lengths(32, 32)
    assert (workload.optimizer_steps_per_iteration, workload.weight_bytes) == (2, 2)
    assert problem.experiment.launch.walltime == "08:00:00"


def test_ppo_has_a_critic_of_the_actors_shape_unless_told(tmp_path: Path) -> None:
    ppo = changed("algorithm", "kind", to="ppo")
    assert read(tmp_path, ppo).workload.critic == architecture("qwen3-0.6b")
    ppo["critic"] = {"architecture": "qwen3-1.7b"}
    assert read(tmp_path, ppo).workload.critic == architecture("qwen3-1.7b")


def test_no_kl_no_reference_and_a_reward_model_is_a_task(tmp_path: Path) -> None:
    document = changed("algorithm", "kl_coefficient", to=0.0)
    document["reward"] = {"kind": "model", "architecture": "qwen3-0.6b"}
    document["model"]["dtype"] = "fp32"
    workload = read(tmp_path, document).workload
    assert workload.tasks == ("actor_generation", "reward_inference", "actor_training")
    assert workload.weight_bytes == 4


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "unknown key": (changed("stepps", to=3), 'unknown key "stepps"; did you mean "steps"?'),
    "unknown nested key": (
        changed("algorithm", "sample_per_prompt", to=8),
        'unknown key "algorithm.sample_per_prompt"; did you mean "samples_per_prompt"?',
    ),
    "unknown key in an optional section": (
        changed("warm_start", "max_step", to=8),
        'unknown key "warm_start.max_step"; did you mean "max_steps"?',
    ),
    "unknown key like none": (
        changed("batch", "zzz", to=8),
        "known keys: prompt_tokens, response_lengths, response_tokens, samples",
    ),
    "missing key": (changed("data", to=...), 'the key "data" is missing'),
    "missing nested key": (changed("batch", "samples", to=...), 'the key "batch.samples" is missing'),
    "no number": (changed("steps", to="many"), "steps: "),
    "too small": (changed("steps", to=0), "steps: "),
    "no section": (changed("batch", to=3), "batch: "),
    "unknown kind": (changed("algorithm", "kind", to="dpo"), "algorithm.kind: "),
    "unknown data": (changed("data", "kind", to="gsm9k"), "data.kind: "),
    "name for a directory": (changed("name", to="../up"), "name: "),
    "name longer than a file's may be": (changed("name", to="x" * 300), "name: "),
    "yes for a number": (changed("steps", to=True), "steps: found true, "),
    "no for a number": (changed("seed", to=False), "seed: found false, "),
    "more samples than tables hold": (changed("batch", "samples", to=8 * 10**9), "batch.samples: "),
    "seed below zero": (changed("seed", to=-1), "seed: "),
    "samples and prompts": (
        changed("batch", "samples", to=60),
        "batch.samples (60) must be a multiple of algorithm.samples_per_prompt (8)",
    ),
    "prompts and minibatches": (
        changed("algorithm", "minibatches", to=3),
        "algorithm.minibatches must divide the 8 prompts",
    ),
    "overlong": (
        changed("reward", "overlong", to={"buffer_tokens": 4097}),
        "reward.overlong.buffer_tokens (4097) is more than batch.response_tokens",
    ),
    "critic of GRPO": (changed("critic", "architecture", to="qwen3-0.6b"), "critic is for algorithm.kind ppo"),
    "stale but synchronous": (changed("algorithm", "max_staleness", to=1), "max_staleness is for mode async"),
    "rule with a model": (changed("reward", "architecture", to="qwen3-0.6b"), "architecture goes with kind model"),
    "model without one": (changed("reward", "kind", to="model"), "architecture goes with kind model"),
    "walltime": (changed("launch", "walltime", to="8h"), '"8h" is not HH:MM:SS'),
    "patience": (changed("launch", "patience", to="10m"), '"10m" is not HH:MM:SS'),
    "patience that outlasts orphans": (
        changed("launch", "patience", to="00:30:00"),
        "orphan_timeout (00:30:00) must be longer than the patience with any link (00:30:00)",
    ),
    "patience that outlasts work": (
        changed("launch", "hang_timeout", to="00:10:00"),
        "hang_timeout (00:10:00) must be longer than the patience with any link (00:10:00)",
    ),
    "patience with a link": (changed("launch", "link_patience", to={"a-b": "1h"}), '"1h" is not HH:MM:SS'),
    "no such link": (
        changed("launch", "link_patience", to={"alpha-omega": "00:20:00"}),
        'launch.link_patience: no link "alpha-omega"',
    ),
    "seventy minutes": (changed("launch", "gang_timeout", to="00:70:00"), "launch.gang_timeout: "),
    "bound of another objective": (
        changed("planner", to={"objective": "cost", "budget_gpu_hours": 9}),
        "planner: budget_gpu_hours is for objective time-to-result, not for cost: leave the objective out, for it",
    ),
    "bounds of two objectives": (
        changed("planner", to={"budget_per_hour": 9, "budget_gpu_hours": 9}),
        "planner: budget_gpu_hours is for objective time-to-result, not for cost: leave out budget_per_hour",
    ),
    "both directions of cost": (
        changed("planner", to={"budget_per_hour": 9, "max_iteration_seconds": 9}),
        "planner: give one of max_iteration_seconds and budget_per_hour: ",
    ),
    "one bound twice": (
        changed("planner", to={"min_samples_per_second": 9, "max_iteration_seconds": 9}),
        "max_iteration_seconds and min_samples_per_second, which say the same, are for the least cost",
    ),
    "sites and scenario": (changed("topology", "scenario", to="s.yaml"), "either sites (and links) or scenario"),
    "neither of both": (changed("topology", "sites", to=[]), "either sites (and links) or scenario"),
    "range upside down": (changed("warm_start", "reward", to=[0.3, 0.2]), "warm_start.reward: the range"),
    "unknown model": (changed("model", "architecture", to="qwen3-8c"), 'unknown architecture "qwen3-8c"; did you mean'),
    "no such site": (changed("topology", "sites", to=["alp.yaml"]), 'topology.sites: there is no file "alp.yaml"'),
    "no such links": (changed("topology", "links", to="l.yaml"), 'topology.links: there is no file "l.yaml"'),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_is_named(tmp_path: Path, case: str) -> None:
    document, message = MISTAKES[case]
    with pytest.raises(UsageError) as caught:
        read(tmp_path, document)
    assert message in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("case", ["unknown key", "missing key", "samples and prompts", "no such site"])
def test_a_mistake_names_the_file(tmp_path: Path, case: str) -> None:
    with pytest.raises(UsageError, match=r"try\.yaml: "):
        read(tmp_path, MISTAKES[case][0])


def test_a_place_that_a_file_was_looked_for_in_is_named_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "try.yaml").write_text(yaml.safe_dump(changed("topology", "sites", to=["alp.yaml"])))
    with pytest.raises(UsageError, match=r'there is no file "alp\.yaml"; looked for alp\.yaml$'):
        read_problem(Path("try.yaml"))


def test_every_mistake_has_a_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        read(tmp_path, {**changed("steps", to=0), "stepps": 1})
    assert len(str(caught.value).splitlines()) == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected keys and values, found NoneType"),
        ("- a", "expected keys and values, found list"),
        ("a: [", "not YAML"),
        ("name: 2020-99-99", "not YAML: month must be"),
        ("a: " + "[" * 5000, "deeper in one another than can be read"),
    ],
)
def test_a_file_that_is_no_experiment(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "try.yaml").write_text(text)
    with pytest.raises(UsageError, match=message):
        read_problem(tmp_path / "try.yaml")


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"absent\.yaml: No such file"):
        read_problem(tmp_path / "absent.yaml")


def test_files_are_found_beside_the_experiment_and_one_above(tmp_path: Path) -> None:
    (tmp_path / "configs").mkdir()
    (tmp_path / "topology").mkdir()
    (tmp_path / "topology" / "scene.yaml").write_text(yaml.safe_dump({"sites": [SITE]}))
    document = changed("topology", to={"scenario": "topology/scene.yaml"})
    (tmp_path / "configs" / "try.yaml").write_text(yaml.safe_dump(document))
    assert [site.name for site in read_problem(tmp_path / "configs" / "try.yaml").topology.sites] == ["alps"]


def test_directories_of_models_and_data_are_found_there_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the quickstart's reward model is, whoever starts it wherever."""
    monkeypatch.chdir(tmp_path)
    experiment = read_problem(ROOT / "configs" / "quickstart-ppo.yaml").experiment
    place = ROOT / "configs" / "models" / "larger-digit-reward"
    assert {experiment.reward.architecture, experiment.reward.weights} == {str(place)}
    assert critic_of(experiment).architecture == str(place)
    assert experiment.model.architecture == "tiny-qwen3"  # of the catalogue


def test_digests_depend_on_what_the_files_say_alone(tmp_path: Path) -> None:
    first = read(tmp_path, BASE).digests
    assert first == read(tmp_path, dict(reversed(BASE.items()))).digests  # the order of keys does not count
    assert first == read(tmp_path, {**BASE, "seed": 0}).digests  # nor does a default that is written out
    assert all(value.startswith("sha256:") and len(value) == 71 for value in first.values())
    other = read(tmp_path, {**BASE, "steps": 4}).digests
    assert (other["experiment"] != first["experiment"], other["topology"] == first["topology"]) == (True, True)


@pytest.mark.parametrize(("clock", "seconds"), [("00:00:00", 0), ("00:10:05", 605), ("100:00:01", 360_001)])
def test_seconds_of_a_clock(clock: str, seconds: int) -> None:
    assert seconds_of(clock) == seconds
