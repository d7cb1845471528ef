"""A login node whose Slurm is in the PATH of login shells alone, as modules and start-up files put it there."""

from __future__ import annotations

import json

import yaml

from hetrl.problem import read_problem
from launch.cli import main
from launch.executor import choose_executor
from tests.launch.slurm.slurm_cases import make_clusters


def test_discover_doctor_and_submit_find_the_same_slurm(tmp_path, monkeypatch, capsys):
    clusters = make_clusters(tmp_path)
    site = yaml.safe_load((tmp_path / "alpha.yaml").read_text())
    (tmp_path / "alpha.yaml").write_text(yaml.safe_dump({**site, "ssh": "local"}))
    config = yaml.safe_load(clusters.config.read_text())
    config["topology"], config["launch"]["executor"] = {"sites": ["alpha.yaml"]}, "auto"
    clusters.config.write_text(yaml.safe_dump(config))
    monkeypatch.setenv("HOME", str(tmp_path / "alpha"))  # whose .bash_profile names the programs
    monkeypatch.setenv("FAKE_CLUSTER", str(tmp_path / "alpha"))
    monkeypatch.chdir(tmp_path)
    problem = read_problem(clusters.config)
    assert choose_executor("auto", problem.scenario.sites) == "slurm"
    assert main(["discover", "alpha.yaml"]) == 0
    capsys.readouterr()
    main(["doctor", "config.yaml", "--json"])
    found = {each["what"]: each["verdict"] for each in json.loads(capsys.readouterr().out)}
    assert found["slurmctld"] == found["programs"] == found["job node-cpu"] == "ok"
