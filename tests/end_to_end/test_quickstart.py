"""The quickstart as a user runs it, twice."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from lab.quickstart import QUICKSTART
from tests.runs import Finished, submit


@pytest.fixture(scope="module")
def twice(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Finished, Finished]]:
    """The quickstart, two times with the same seed."""
    work = tmp_path_factory.mktemp("quickstart")
    yield submit(QUICKSTART, work / "first"), submit(QUICKSTART, work / "second")


def test_it_learns(twice: tuple[Finished, Finished]) -> None:
    run = twice[0]
    assert run.code == 0, run.stderr
    summary = run.summary()
    assert summary["steps"] >= 30
    assert summary["reward_first"] <= 0.35
    assert summary["reward_last"] >= 0.8
    assert 0.2 <= summary["warm_start"]["reward"] <= 0.3
    assert {"megatron-core", "vllm"} <= set(summary["engines"])
    assert summary["sites"][0] == "alpha"
    assert set(summary["sites"]) == {"alpha", "beta", "gamma"}
    for seconds in summary["tasks"].values():
        assert seconds["predicted_seconds"] > 0
        assert seconds["measured_seconds"] > 0


def test_every_batch_was_drawn_under_the_weights_of_its_step(twice: tuple[Finished, Finished]) -> None:
    summary = twice[0].summary()
    versions = [set(drawn) for _, drawn in summary["batch_versions"]]
    assert len(versions) == summary["steps"]
    numbers = [int(next(iter(drawn))) for drawn in versions]
    assert all(len(drawn) == 1 for drawn in versions)
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    assert {row["version"] for row in summary["weight_versions"]} >= set(numbers)
    assert len({row["digest"] for row in summary["weight_versions"]}) == len(summary["weight_versions"])


def test_both_engines_agree_on_every_log_prob(twice: tuple[Finished, Finished]) -> None:
    assert max(row["mismatch"] for row in twice[0].rows()) < 1e-4


def test_the_same_seed_gives_the_same_rewards(twice: tuple[Finished, Finished]) -> None:
    first, second = ([row["reward"] for row in run.rows()] for run in twice)
    assert first == second


def test_sites_share_no_file(twice: tuple[Finished, Finished]) -> None:
    sites = twice[0].directory / "sites"
    assert {path.name for path in sites.iterdir()} == {"alpha", "beta", "gamma"}
    for site in sites.iterdir():
        others = {other.name for other in sites.iterdir()} - {site.name}
        own = json.loads((site / "keys.json").read_text())
        assert own["site"] == site.name
        assert set(own["peers"]) == others
        assert (site / "keys.json").stat().st_mode & 0o077 == 0
    assert not [path for path in sites.rglob("*") if path.is_symlink()]


def test_the_run_directory_is_whole(twice: tuple[Finished, Finished]) -> None:
    directory = twice[0].directory
    names = [
        "config.yaml",
        "plan.json",
        "plan.html",
        "report.html",
        "events.jsonl",
        "metrics.jsonl",
        "state.json",
        "summary.json",
    ]
    assert [name for name in names if not (directory / name).is_file()] == []
    (checkpoint,) = (directory / "checkpoints").iterdir()
    assert (checkpoint / "COMPLETE").is_file()
    assert (checkpoint / "model.safetensors").is_file()
    kinds = [json.loads(line)["kind"] for line in (directory / "events.jsonl").read_text().splitlines()]
    assert kinds.index("planned") < kinds.index("submitted") < kinds.index("go") < kinds.index("step")
    assert json.loads((directory / "state.json").read_text())["phase"] == "finished"
    assert "error" not in twice[0].stderr.lower()
