"""The ways in which a run can fail to start."""

from __future__ import annotations

from pathlib import Path

from hetrl.runtime.weights.tiny_model import write_tiny_model
from lab.quickstart import changed
from tests.runs import submit

FAST = {"budget_seconds": 1}


def test_a_rollout_server_that_never_gets_healthy_ends_the_run(tmp_path: Path) -> None:
    config = changed(tmp_path, launch={"gang_timeout": "00:00:04"}, planner=FAST)
    run = submit(config, tmp_path)
    assert run.code == 6
    assert "actor_generation" in run.stderr
    assert "gang_timeout" in run.stderr


def test_a_rank_that_dies_at_start_ends_the_run(tmp_path: Path) -> None:
    directory = tmp_path / "model"
    write_tiny_model(directory)
    (directory / "model.safetensors").write_bytes(b"not weights")
    config = changed(tmp_path, model={"architecture": str(directory), "weights": str(directory)}, planner=FAST)
    run = submit(config, tmp_path)
    assert run.code == 2
    assert "alpha" in run.stderr
    assert "model.safetensors" in run.stderr
    assert "actor_training" in run.stderr
    assert f"{run.directory.name}/logs" in run.stderr


def test_a_model_that_fits_nowhere_has_no_plan(tmp_path: Path) -> None:
    large = {"hidden": 8192, "layers": 80, "heads": 64, "kv_heads": 8, "head_dim": 128, "intermediate": 28672}
    write_tiny_model(tmp_path / "model", **large)
    run = submit(changed(tmp_path, model={"architecture": str(tmp_path / "model")}), tmp_path)
    assert run.code == 3
    assert "GB" in run.stderr
    assert not (tmp_path / "runs").exists()
