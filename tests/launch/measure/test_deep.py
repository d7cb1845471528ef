"""`hetrl doctor --deep`: what is looked at on a node, and what is made of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from hetrl.problem import read_problem
from hetrl.runtime.instruments.node_check import MARK
from launch.findings import Finding, Wish
from launch.measure import deep
from launch.measure.deep import judge_job, look_at_nodes
from launch.slurm.commands import Queued
from launch.slurm.doctor import node_scripts
from launch.slurm.files import pack
from launch.slurm.poll import Chunk, Look
from launch.slurm.stage import write_script
from tests.launch.launch_cases import ROOT
from tests.launch.slurm.slurm_cases import environment, make_clusters
from tests.launch.slurm.slurm_plans import problem

WISH = Wish(3600.0, {"vllm": "0.32.0"}, models=("/models/actor",), data="/data/x.jsonl")
KEYS = {"gres": {"gh200": "gh200"}, "container": "/images/hetrl.sif", "interface": "hsn0", "cpu_bind": "rank_ldom"}
NODES = {"name": "gh", "gpu": "gh200", "gpus": 4, "count": 2}
RELAY = {"egress": "relay", "relay": "relay.example.org:7000"}
ASKED = problem({"name": "alps", **KEYS, **RELAY, "nodes": [NODES]})
(SITE,) = ASKED.scenario.sites
(SCRIPT,) = node_scripts(ASKED, SITE, WISH, "doctor-1", "/scratch/hetrl/doctor-1/alps", "00:10:00")
GOOD = {
    "host": "nid7",
    "python": "3.11.7",
    "packages": {"vllm": "0.32.0", "torch": "2.13.0"},
    "models": [],
    "data": [],
    "interfaces": ["hsn0", "lo"],
    "knock": "",
    "granted": 4,
    "seen": 4,
}


def judged(text: str, state: str | None = "COMPLETED", log: str | None = None) -> list[Finding]:
    job = {} if state is None else {SCRIPT.key: Queued("7", "x", state, "Resources", None, "")}
    data = text.encode()
    return list(
        judge_job(SITE, SCRIPT, Look(job, (Chunk(log or f"logs/{SCRIPT.name}.log", len(data), 0, data),)), WISH)
    )


def test_a_job_takes_a_node_as_a_runs_processes_would():
    assert SCRIPT.name == "node-gh200"
    for words in ("--exclusive", "--gres=gpu:gh200:4", "--cpu-bind=rank_ldom", "apptainer exec --nv", "00:10:00"):
        assert words in SCRIPT.text
    (row,) = SCRIPT.rows["0"]
    asked = json.loads(row.argv[-1])
    assert asked["models"] == ["/models/actor"] and asked["data"] == ["/data/x.jsonl"]
    assert (asked["interface"], asked["knock"], asked["gpus"]) == ("hsn0", "relay.example.org:7000", True)
    assert row.environment == {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}


def test_a_node_where_all_holds():
    assert judged(f"a banner\n{MARK}{json.dumps(GOOD)}\n") == [
        Finding("alps", "node gh200", "ok", "nid7: python 3.11.7, 4 GPUs")
    ]


@pytest.mark.parametrize(
    ("changes", "what", "said"),
    [
        ({"packages": {"vllm": None}}, "packages", "not installed: vllm"),
        ({"packages": {"vllm": "0.9"}}, "versions", "vllm 0.9, not 0.32.0"),
        ({"models": ["/models/actor"]}, "models", "no config.json in /models/actor"),
        ({"data": ["/data/x.jsonl"]}, "data", "/data/x.jsonl cannot be read"),
        ({"interfaces": ["eth0", "lo"]}, "interface", "nid7 has no hsn0"),
        ({"knock": "timed out"}, "relay", "relay.example.org:7000 does not answer from nid7: timed out"),
        ({"seen": 0}, "gpus", "torch on nid7 sees 0, granted are 4"),
        ({"seen": "OSError: libcuda.so"}, "gpus", "sees OSError: libcuda.so"),
    ],
)
def test_each_thing_that_only_a_job_sees(changes, what, said):
    (finding,) = judged(f"{MARK}{json.dumps({**GOOD, **changes})}\n")
    assert finding.what == f"node gh200: {what}" and finding.verdict != "ok"
    assert said in finding.found and finding.remedy


def test_a_job_that_says_nothing_is_explained():
    (failed,) = judged("FATAL: could not open image /images/hetrl.sif\n", "FAILED", f"logs/{SCRIPT.name}-7_0.log")
    assert failed.found == "its job ended: FAILED: FATAL: could not open image /images/hetrl.sif"
    (garbled,) = judged(f"{MARK}{json.dumps({**GOOD, 'granted': 'all'})}\n")
    assert garbled.verdict == "failed" and "cannot be read" in garbled.found
    (waits,) = judged("", "PENDING")
    assert waits.found == "its job did not end in time: it is PENDING (Resources)"
    (gone,) = judged("", None)
    assert gone.verdict == "failed" and "Slurm lists it no longer" in gone.found


def test_what_a_node_says_of_itself(tmp_path):
    (tmp_path / "config.json").touch()
    asked = {
        "packages": ["msgspec", "no-such-package"],
        "models": [str(tmp_path), "/nowhere"],
        "data": [str(tmp_path / "x")],
        "interface": "lo",
        "knock": "127.0.0.1:1",
        "gpus": False,
    }
    command = [sys.executable, "-S", "-m", "hetrl.runtime.instruments.node_check", json.dumps(asked)]
    given = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "GPU-1,GPU-2"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=given, cwd=tmp_path)
    found = json.loads(done.stdout.removeprefix(MARK))
    assert found["packages"] == {"msgspec": None, "no-such-package": None}  # -S: nothing is installed
    assert (found["models"], found["data"]) == (["/nowhere"], [str(tmp_path / "x")])
    assert "lo" in found["interfaces"] and "refused" in found["knock"]
    assert (found["granted"], found["seen"]) == (2, None)


SRUN = """#!/bin/sh
while [ "${1#--}" != "$1" ]; do shift; done
exec "$@"
"""


def test_the_script_runs_and_its_log_is_understood(tmp_path):
    """On this machine, with an srun that starts its words."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "srun").write_text(SRUN)
    (tmp_path / "bin" / "srun").chmod(0o755)
    there, nodes = tmp_path / "it's there", [{"name": "n", "gpu": "cpu", "gpus": 2}]
    there.mkdir()
    asked = problem({"name": "here", "python": sys.executable, "nodes": nodes, "setup": ["export SET=1"]})
    (site,) = asked.scenario.sites
    wish = Wish(3600.0, {}, models=(str(there / "model"),))
    (script,) = node_scripts(asked, site, wish, "doctor-1", str(there), "00:10:00")
    write_script(there, script)
    pack(there)
    given = {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "SLURM_ARRAY_TASK_ID": "0", "SLURM_ARRAY_JOB_ID": "7"}
    command = ["bash", str(there / "scripts" / f"{script.name}.sbatch")]
    subprocess.run(command, cwd=there, env={**given, "SLURM_JOB_NODELIST": "n1"}, check=True, capture_output=True)
    log = (there / "logs" / f"{script.name}.log").read_bytes()
    job = Queued("7", "x", "COMPLETED", "None", None, "n1")
    found = list(
        judge_job(site, script, Look({script.key: job}, (Chunk(f"logs/{script.name}.log", len(log), 0, log),)), wish)
    )
    assert [(each.what, each.verdict) for each in found] == [("node cpu: models", "failed")]


def test_a_job_that_does_not_start_is_named_and_nothing_is_left_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(deep, "POLL_SECONDS", 0.1)
    clusters = make_clusters(tmp_path)
    with environment(clusters):
        asked = read_problem(clusters.config)
        clusters.fault("alpha", "sbatch", "pending")
        clusters.fault("beta", "sbatch", "refuse")
        sites = [site for site in asked.scenario.sites if site.name != "gamma"]
        found = {each.site: each for each in look_at_nodes(asked, sites, replace(WISH, models=()), wait_seconds=0.5)}
    assert "it is PENDING (Resources)" in found["alpha"].found
    assert "Invalid account" in found["beta"].found
    assert clusters.states()["alpha"] == ["CANCELLED"]
    assert not list(tmp_path.glob("*/scratch/hetrl/*"))
