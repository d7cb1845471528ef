"""`hetrl doctor` as it is typed, on clusters that are played; one has Slurm in the PATH of login shells alone."""

from __future__ import annotations

import json

import yaml

from hetrl.problem import read_problem
from launch.cli import main
from launch.executor import choose_executor
from tests.launch.slurm.slurm_cases import environment, make_clusters


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


def test_data_that_only_the_leading_site_reads_is_a_warning_while_several_may_lead(tmp_path, capsys):
    clusters = make_clusters(tmp_path)
    config = yaml.safe_load(clusters.config.read_text())
    clusters.config.write_text(yaml.safe_dump({**config, "data": {"kind": "gsm8k", "path": "/nowhere/gsm8k"}}))
    found = {}
    with environment(clusters):
        for engines in (["megatron", "vllm"], ["vllm"]):
            for site in ("beta", "gamma"):
                file = yaml.safe_load((tmp_path / f"{site}.yaml").read_text())
                (tmp_path / f"{site}.yaml").write_text(yaml.safe_dump({**file, "engines": engines}))
            main(["doctor", "config.yaml", "--json"])
            rows = json.loads(capsys.readouterr().out)
            found[len(engines)] = {row["site"]: row["verdict"] for row in rows if row["what"] == "data"}
    assert found == {2: dict.fromkeys(("alpha", "beta", "gamma"), "warning"), 1: {"alpha": "failed"}}
