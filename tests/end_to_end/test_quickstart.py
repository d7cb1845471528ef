"""The quickstart as a user runs it, and again in asynchronous mode without staleness, which is the same run."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path

import psutil
import pytest

from lab.quickstart import QUICKSTART, changed
from tests.runs import Finished, Submitted, drew_again, started, submit, submitted

REPLICA = "gamma/actor_generation/1"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """The quickstart."""
    return submit(QUICKSTART, tmp_path_factory.mktemp("quickstart"))


def test_it_learns(run: Finished) -> None:
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


def test_every_batch_was_drawn_under_the_weights_of_its_step(run: Finished) -> None:
    summary = run.summary()
    versions = [set(drawn) for _, drawn in summary["batch_versions"]]
    assert len(versions) == summary["steps"]
    numbers = [int(next(iter(drawn))) for drawn in versions]
    assert all(len(drawn) == 1 for drawn in versions)
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    assert {row["version"] for row in summary["weight_versions"]} >= set(numbers)
    assert len({row["digest"] for row in summary["weight_versions"]}) == len(summary["weight_versions"])


def test_both_engines_agree_on_the_log_probs(run: Finished) -> None:
    assert max(row["mismatch"] for row in run.rows()) < 1e-6


def test_a_batch_is_generated_while_the_trainer_waits_for_it_and_nothing_scores_it_beforehand(run: Finished) -> None:
    for row in run.rows():
        seconds = row["seconds"]
        assert set(seconds) == {"generation_wait", "actor_generation", "actor_training", "weight_sync", "iteration"}
        assert 0 < seconds["actor_generation"] == row["generation_latency_seconds"]
        assert row["ratio"] == 1.0


def test_gpu_hours_are_those_of_the_nodes_that_the_plan_holds(run: Finished) -> None:
    held = json.loads((run.directory / "sites" / "alpha" / "site.json").read_text())["held"]
    hours = run.summary()["gpu_hours"]
    assert set(hours) == set(held) == {"alpha", "beta", "gamma"}
    assert hours["alpha"] / held["alpha"] == pytest.approx(hours["beta"] / held["beta"], rel=0.05)


def test_a_run_whose_lead_site_is_gone_goes_on_from_the_copy_at_another_one_and_with_a_server_less(
    run: Finished, tmp_path: Path
) -> None:
    """A rank of the trainer and a replica are killed, then all files of their site are lost, then a server is killed.

    That one is started again, and meanwhile the other one draws its samples: all bits are those of the quickstart.
    """
    copied = {"every_steps": 2, "copy_to": ["gamma"]}
    config, plan = changed(tmp_path, steps=300, checkpoints=copied), str(run.directory / "plan.json")
    with submitted(config, tmp_path, "--plan", plan, "--yes") as going:
        going.until("checkpoint_copied", 2)  # of step 0, the end of the warm start, and of step 2
        kill(going.directory, "hetrl.runtime.run.trainer", "--rank 1")
        kill(going.directory, "hetrl.runtime.run.rollout", "--replica 0")
        broken = going.finish()
    assert broken.code != 0
    shutil.rmtree(broken.directory / "sites" / "alpha")
    with started(tmp_path, "resume", broken.directory.name, "--yes") as again:
        again.next_directory(broken.directory)
        again.until("step", 2)
        kill(again.directory / "sites" / "gamma", "hetrl.runtime.vllm.serve", "serve")
        again.until("replica_back", 1)
        back = again.events("step")[-1]["step"]
        while not drew_again(again.directory, REPLICA, back) or len(copies_at(again)) < 2:
            again.until("step", len(again.events("step")) + 1)
        again.interrupt()
        resumed = again.finish()

    (event,) = again.events("resumed")
    assert event["step"] >= 2 and event["rows"] == event["step"]
    assert copies_at(again) == {"alpha", "gamma"}  # brought, and copied anew once the replica that takes it was back
    lost, returned = again.events("replica_lost", "replica_back")
    assert (lost["kind"], lost["member"]) == ("replica_lost", REPLICA)
    assert "exit code -9" in lost["cause"]
    assert (returned["kind"], returned["member"]) == ("replica_back", REPLICA)
    rows = resumed.rows()[: len(run.rows())]
    assert [row for row in rows if set(row["replicas"]) == {"beta/actor_generation/0"}]
    assert [row["reward"] for row in rows] == [row["reward"] for row in run.rows()[: len(rows)]]
    served = {one["version"]: one["digest"] for one in run.summary()["weight_versions"]}
    published = {one["version"]: one["digest"] for one in again.events("weights_published")}
    assert len(common := served.keys() & published.keys()) > 2
    assert all(served[version] == published[version] for version in common)


def copies_at(run: Submitted) -> set[str]:
    """Return the sites to which checkpoints were copied so far."""
    return {row["site"] for row in run.events("checkpoint_copied")}


def kill(directory: Path, module: str, words: str) -> None:
    """Kill the process of a run, or of a site of it, that runs a module with these words."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            command = f"{' '.join(process.cmdline())} "
            if module in command and f"{words} " in command and Path(process.cwd()).is_relative_to(directory.resolve()):
                process.kill()


def test_sites_share_no_file(run: Finished) -> None:
    sites = run.directory / "sites"
    assert {path.name for path in sites.iterdir()} == {"alpha", "beta", "gamma"}
    for site in sites.iterdir():
        others = {other.name for other in sites.iterdir()} - {site.name}
        own = json.loads((site / "keys.json").read_text())
        assert own["site"] == site.name
        assert set(own["peers"]) == others
        assert (site / "keys.json").stat().st_mode & 0o077 == 0
    assert not [path for path in sites.rglob("*") if path.is_symlink()]


def test_the_run_directory_is_whole(run: Finished) -> None:
    directory = run.directory
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
    warm, last = sorted((directory / "checkpoints").iterdir())  # behind the warm start, behind the last step
    assert warm.name == "step-00000000"
    for checkpoint in (warm, last):
        assert (checkpoint / "COMPLETE").is_file()
        assert (checkpoint / "model.safetensors.index.json").is_file()
    kinds = [json.loads(line)["kind"] for line in (directory / "events.jsonl").read_text().splitlines()]
    assert kinds.index("planned") < kinds.index("submitted") < kinds.index("go") < kinds.index("step")
    assert kinds.index("checkpoint") < kinds.index("step")
    assert "checkpoint" in kinds[kinds.index("step") : kinds.index("finished")]
    assert json.loads((directory / "state.json").read_text())["phase"] == "finished"
    assert "error" not in run.stderr.lower()
