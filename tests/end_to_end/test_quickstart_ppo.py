"""PPO over three sites, with a critic and a reward model, as a user runs it."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

from lab.lab import ROOT
from tests.runs import submit

LAST = 5


def test_ppo_learns_what_its_reward_model_and_the_rule_agree_on(tmp_path: Path) -> None:
    run = submit(ROOT / "configs" / "quickstart-ppo.yaml", tmp_path)
    assert run.code == 0, run.stderr
    summary, rows = run.summary(), run.rows()
    assert summary["reward_first"] <= 0.35
    assert summary["reward_last"] >= 0.8
    assert set(summary["sites"]) == {"alpha", "beta", "gamma"}
    assert fmean(row["reward_rule"] for row in rows[-LAST:]) >= 0.8
    assert fmean(row["explained_variance"] for row in rows[-LAST:]) > 0.5
    assert [row["critic_version"] for row in rows] == list(range(len(rows)))
    for task, seconds in summary["tasks"].items():
        assert seconds["predicted_seconds"] > 0, task
        assert seconds["measured_seconds"] > 0, task
    checkpoints = run.directory / "checkpoints"
    for own in (checkpoints, checkpoints / "critic_training"):
        assert (own / f"step-{len(rows):08d}" / "COMPLETE").exists()
    assert not [*(run.directory / "sites").glob("*/weights-*")], "versions go with the worlds that they were sent to"
