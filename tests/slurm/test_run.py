"""A whole run over three real clusters, of configs/lab.yaml: discovered, probed, planned, submitted; real engines.

The clusters share nothing but ssh. Slurm's GPUs are fake: each one that it grants is a process on the CPU. The login of
one wants a second factor, and the Slurm of one knows of no GPUs.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from lab.available import skip_unless_available
from lab.lab import ROOT, Lab
from lab.launcher import until_nothing_is_queued
from lab.processes import wait_until
from lab.shape import RUN_SITES as SITES
from lab.submission import CHECKOUT, SITE_FILES, in_checkout, log_in
from tests.runs import drew_again, events_of, job_ids

CONFIG, ACROSS = f"{CHECKOUT}/configs/lab.yaml", f"{CHECKOUT}/configs/lab-training.yaml"
STEPS = 8
FAILED_STEPS = 12  # enough are left when the trainers are killed
RUN_SECONDS = 600


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    """Three strangers, no larger than two cores can bear."""
    skip_unless_available()
    with Lab(SITES, slurm=True) as lab:
        yield lab


def hetrl(lab: Lab, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command line on the head of alpha, as docs/lab.md says."""
    return lab.run("alpha", ["venv/bin/hetrl", *arguments], timeout_seconds=RUN_SECONDS, check=False)


def logs(home: Path) -> str:
    """Return what the processes of all runs said."""
    return "\n".join(f"== {path}\n{path.read_text()[-3000:]}" for path in home.glob("runs/*/logs/*/*.log"))


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_second_factor_is_asked_for_once_and_beforehand(lab: Lab) -> None:
    """beta is out of reach until its user has logged in; from then on that connection is taken."""
    (beta,) = (name for name, site in SITES.items() if site.second_factor)
    before = hetrl(lab, "discover", SITE_FILES[list(SITES).index(beta)])
    assert before.returncode == 4, before.stderr
    assert "Permission denied" in before.stderr and "log in once beforehand" in before.stderr
    log_in(lab)
    found = hetrl(lab, "discover", *SITE_FILES)
    assert found.returncode == 0, found.stderr
    for site, shape in SITES.items():
        inventory = json.loads((lab.home("alpha") / f"topology/measured/{site}.json").read_text())
        assert [node["gpus"] for node in inventory["nodes"]] == [{shape.gpu: shape.gpus_per_node} if shape.gres else {}]


def test_probed_planned_and_trained_over_three_clusters(lab: Lab) -> None:
    home = lab.home("alpha")

    probed = hetrl(lab, "probe", CONFIG, "--seconds", "2", "--streams", "1", "--round-trips", "5")
    assert probed.returncode == 0, probed.stdout + probed.stderr
    (measured,) = (home / "topology/measured").glob("links-*.json")
    assert len(json.loads(measured.read_text())["links"]) == 6

    planned = hetrl(lab, "plan", CONFIG, "--output", "plan.json")
    assert planned.returncode == 0, planned.stderr
    tasks = json.loads((home / "plan.json").read_text())["tasks"]
    assert devices_of(tasks["actor_training"]) == ["alpha/cpu/0", "alpha/cpu/1"]
    assert devices_of(tasks["actor_generation"]) == ["beta/cpu/0", "gamma/cpu/0"]

    done = hetrl(lab, "submit", CONFIG, "--plan", "plan.json", "--yes")
    assert done.returncode == 0, done.stdout + done.stderr + logs(home)
    (run,) = (home / "runs").iterdir()
    assert_trained(run)
    assert_jobs(run)
    until_nothing_is_queued(lab)
    moved_bytes = json.loads((run / "summary.json").read_text())["bytes_per_link"]
    for site in ("beta", "gamma"):
        assert lab.bytes_between("alpha", site) > moved_bytes[f"alpha-{site}"] > 1_000_000


def test_a_job_on_a_node_of_every_site_says_what_only_it_sees(lab: Lab) -> None:
    assert (lab.home("alpha") / "plan.json").exists(), "the run over three clusters discovers and probes first"
    looked = hetrl(lab, "doctor", "--deep", CONFIG, "--json")
    assert looked.stdout, looked.stderr
    found = {(each["site"], each["what"]): each for each in json.loads(looked.stdout)}
    assert {site: found.get((site, "node cpu"), {}).get("verdict") for site in SITES} == dict.fromkeys(SITES, "ok")
    assert found["gamma", "node cpu"]["found"].startswith("gamma-1: python 3.")
    until_nothing_is_queued(lab)
    assert not any(list((lab.home(site) / "scratch").glob("hetrl/doctor-*/*")) for site in SITES)


def test_a_rehearsal_at_the_sites_is_a_job_of_a_core_at_each(lab: Lab) -> None:
    """Over the same links, with nobody's engines."""
    home = lab.home("alpha")
    assert (home / "plan.json").exists(), "the run over three clusters plans first"
    done = hetrl(lab, "rehearse", CONFIG, "--plan", "plan.json", "--at-sites", "--steps", "3", "--json")
    assert done.returncode == 0, done.stdout + done.stderr + logs(home)
    found = json.loads(done.stdout)
    run = home / "runs" / found["run"]
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["steps"], set(summary["sites"])) == (3, set(SITES))
    assert set(summary["engines"].values()) == {"emulated"}
    assert found["tasks"]["actor_training"]["rehearsed_seconds"] > 0
    submitted = [event for event in lines(run / "events.jsonl") if event["kind"] == "submitted"]
    assert sorted((each["site"], each["job_kind"]) for each in submitted) == [(site, "gang") for site in sorted(SITES)]
    until_nothing_is_queued(lab)


def test_a_run_begins_without_a_cluster_whose_nodes_are_taken_and_takes_it_in_when_they_are_free(lab: Lab) -> None:
    """Nothing is computed: what begins, waits and joins is the same."""
    home = lab.home("alpha")
    assert (home / "plan.json").exists(), "the run over three clusters plans first"
    write_emulated(home, "late.yaml", 1000, start_with=1)
    before = newest_run(home)
    filling = ["sbatch", "--parsable", "--exclusive", "--time=30", "--output=/dev/null", "--wrap=sleep 1800"]
    taken = lab.run("gamma", filling).stdout.strip()
    with lab.popen("alpha", ["venv/bin/hetrl", "submit", "late.yaml", "--plan", "plan.json", "--yes"]) as following:
        wait_until(lambda: newest_run(home) != before, RUN_SECONDS, lambda: "no run")
        wait_until(lambda: len(events(home, "step")) > 2, RUN_SECONDS, lambda: logs(home))
        ((go,), joined) = events(home, "go"), events(home, "replica_joined")
        assert (go["absent"], joined) == (["gamma/actor_generation/1"], [])
        lab.run("gamma", ["scancel", taken])
        draws(home, go["absent"][0], 0)
        released = hetrl(lab, "release", "gamma")
        assert released.returncode == 0, released.stderr
        assert "gamma: 1 job cancelled" in released.stdout
        without = len(events(home, "step")) + 3
        wait_until(lambda: len(events(home, "step")) > without, RUN_SECONDS, lambda: logs(home))
        until_nothing_is_queued(lab, "gamma", timeout_seconds=RUN_SECONDS)
        assert [event["member"] for event in events(home, "replica_released")] == go["absent"]
        added = hetrl(lab, "add", "gamma")
        assert added.returncode == 0, added.stderr
        draws(home, go["absent"][0], len(events(home, "step")))
        assert hetrl(lab, "cancel").returncode == 0
        following.wait(RUN_SECONDS)
    assert [event["member"] for event in events(home, "replica_joined")] == go["absent"]
    assert events(home, "replica_back") and not events(home, "replica_lost")
    assert not [row for row in lines(newest_run(home) / "metrics.jsonl") if row.get("faults")]
    until_nothing_is_queued(lab)


def test_a_run_that_failed_goes_on_with_the_nodes_that_it_has(lab: Lab) -> None:
    """The trainers are killed: the jobs of all sites become those of the next run."""
    home = lab.home("alpha")
    assert (home / "plan.json").exists(), "the run over three clusters plans first"
    write_emulated(home, "again.yaml", FAILED_STEPS, restarts=1)
    before = newest_run(home)
    with lab.popen("alpha", ["venv/bin/hetrl", "submit", "again.yaml", "--plan", "plan.json", "--yes"]) as following:
        wait_until(lambda: newest_run(home) != before, RUN_SECONDS, lambda: "no run")
        failed = newest_run(home)
        wait_until(lambda: len(events(home, "step")) > 4, RUN_SECONDS, lambda: logs(home))
        steps = lab.run("alpha", ["squeue", "--steps", "--noheader", "--format=%i %j"]).stdout.splitlines()
        (engines,) = (line.split()[0] for line in steps if line.endswith(" emulated"))
        lab.run("alpha", ["scancel", "--signal=KILL", engines])
        assert following.wait(RUN_SECONDS) == 0, logs(home)
    run = newest_run(home)
    assert run != failed
    assert [row["step"] for row in lines(run / "metrics.jsonl")] == list(range(1, FAILED_STEPS + 1))
    assert job_ids(run) == job_ids(failed)
    assert {site for site, _ in job_ids(run)} == set(SITES)
    until_nothing_is_queued(lab)


def draws(home: Path, replica: str, behind: int) -> None:
    """Wait until a replica draws behind a step of the newest run."""
    wait_until(lambda: drew_again(newest_run(home), replica, behind), RUN_SECONDS, lambda: logs(home))


def events(home: Path, kind: str) -> list[dict[str, Any]]:
    """Return the events of a kind of the newest run so far."""
    return events_of(newest_run(home), kind)


def test_tasks_that_share_devices_take_turns_in_one_job(lab: Lab) -> None:
    """Generation, reference and training on the two devices of alpha, each gone while another one computes."""
    home = lab.home("alpha")
    assert (home / "plan.json").exists(), "the run over three clusters plans first"
    write_shared(home)
    done = hetrl(lab, "submit", "shared.yaml", "--plan", "shared.json", "--yes")
    assert done.returncode == 0, done.stdout + done.stderr + logs(home)
    run = newest_run(home)
    rows = lines(run / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2]
    assert all(row["turn_seconds"] > 0 for row in rows)
    assert rows[1]["kl"] > 0
    submitted = [event for event in lines(run / "events.jsonl") if event["kind"] == "submitted"]
    assert [(each["site"], each["job_kind"]) for each in submitted] == [("alpha", "gang")]


def test_a_run_that_has_ended_goes_on_with_more_steps(lab: Lab) -> None:
    """That of the test before: its reference is that of its first step, its optimiser that of its last."""
    home = lab.home("alpha")
    assert (home / "shared.yaml").exists(), "the run of shared devices comes first"
    before = newest_run(home)
    experiment = yaml.safe_load((home / "shared.yaml").read_text())
    (home / "more.yaml").write_text(yaml.safe_dump({**experiment, "steps": 3}))
    done = hetrl(lab, "resume", before.name, "--config", "more.yaml", "--yes")
    assert done.returncode == 0, done.stdout + done.stderr + logs(home)
    run = newest_run(home)
    assert run != before
    rows = lines(run / "metrics.jsonl")
    assert rows[:2] == lines(before / "metrics.jsonl")
    assert rows[2]["step"] == 3 and rows[2]["kl"] > 0
    assert rows[2]["weight_version"] == rows[1]["weight_version"] + 1
    (resumed,) = (event for event in lines(run / "events.jsonl") if event["kind"] == "resumed")
    assert (resumed["step"], resumed["version"]) == (2, rows[2]["weight_version"])


def test_one_training_over_two_clusters_learns_as_over_one(lab: Lab) -> None:
    """Three replicas, at alpha and at beta."""
    home = lab.home("alpha")
    assert (home / "plan.json").exists(), "the run over three clusters plans first"
    planned = hetrl(lab, "plan", ACROSS, "--output", "across.json")
    assert planned.returncode == 0, planned.stderr
    plan = json.loads((home / "across.json").read_text())
    assert devices_of(plan["tasks"]["actor_training"]) == ["alpha/cpu/0", "alpha/cpu/1", "beta/cpu/0"]
    came_before = lab.stats()["beta", "alpha"].bytes
    done = hetrl(lab, "submit", ACROSS, "--plan", "across.json", "--yes")
    assert done.returncode == 0, done.stdout + done.stderr + logs(home)
    run = newest_run(home)
    assert_trained(run)
    moved_bytes = json.loads((run / "summary.json").read_text())["bytes_per_link"]
    lead, other = (site for site in plan["site_order"] if site != "gamma")  # the links as measured say which leads
    assert moved_bytes[f"{lead}-{other}"] > 1_000_000
    assert lab.stats()["beta", "alpha"].bytes - came_before > 1_000_000, "gradients come back"


def test_one_pipeline_over_two_clusters_trains(lab: Lab) -> None:
    """A stage at alpha and one at beta: activations cross for every micro-batch, gradients come back."""
    home = lab.home("alpha")
    assert (home / "across.json").exists(), "the training over two clusters is planned first"
    write_pipeline(home)
    before = lab.stats()
    done = hetrl(lab, "submit", "pipeline.yaml", "--plan", "pipeline.json", "--yes")
    assert done.returncode == 0, done.stdout + done.stderr + logs(home)
    rows = lines(newest_run(home) / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2]
    assert all(0 < row["reward"] < 1 and row["grad_norm"] > 0 for row in rows)
    for pair in (("alpha", "beta"), ("beta", "alpha")):
        assert lab.stats()[pair].bytes - before[pair].bytes > 500_000, pair


def newest_run(home: Path) -> Path:
    """Return the run that was started last; rehearsals have another name."""
    return max((home / "runs").iterdir(), key=lambda run: run.name[-len("20261231-235959") :])


def write_emulated(home: Path, name: str, steps: int, **launch: object) -> None:
    """Write an experiment in which nothing is computed."""
    experiment = with_paths(yaml.safe_load((ROOT / "configs/lab.yaml").read_text()))
    del experiment["warm_start"]
    changes = {"engines": "emulated", **launch}
    document = {**experiment, "steps": steps, "launch": {**experiment["launch"], **changes}}
    (home / name).write_text(yaml.safe_dump(document))


def write_shared(home: Path) -> None:
    """Write an experiment with a reference model, and a plan for it that uses alpha alone."""
    site = yaml.safe_load((ROOT / "topology/sites/lab-alpha.yaml").read_text())
    (home / "alpha.yaml").write_text(yaml.safe_dump({**site, "engines": ["megatron", "vllm"]}))
    experiment = with_paths(yaml.safe_load((ROOT / "configs/lab.yaml").read_text()))
    experiment["topology"]["sites"] = ["alpha.yaml", *SITE_FILES[1:]]
    experiment["steps"], experiment["algorithm"]["kl_coefficient"] = 2, 0.05
    (home / "shared.yaml").write_text(yaml.safe_dump(experiment))
    plan = json.loads((home / "plan.json").read_text())
    tasks = plan["tasks"]
    training = {**tasks["actor_training"], "idle_state": "offload"}
    servers = [
        {**server, "stages": [{**server["stages"][0], "devices": [f"alpha/cpu/{number}"]}]}
        for number, server in enumerate(tasks["actor_generation"]["replicas"])
    ]
    generation = {**tasks["actor_generation"], "idle_state": "offload", "replicas": servers}
    reference = {"engine": "megatron", "idle_state": "offload", "replicas": training["replicas"]}
    plan["tasks"] = {"actor_generation": generation, "reference_inference": reference, "actor_training": training}
    plan["groups"] = [{"tasks": [*plan["tasks"]], "devices": devices_of(training), "job": "gang"}]
    plan["site_order"], plan["weight_sync"]["routes"] = ["alpha"], []
    (home / "shared.json").write_text(json.dumps(plan))


def write_pipeline(home: Path) -> None:
    """Write an experiment of two steps, and a plan for it whose training is a pipeline over alpha and beta."""
    experiment = with_paths(yaml.safe_load((ROOT / "configs/lab-training.yaml").read_text()))
    experiment["warm_start"]["reward"] = [0.1, 0.5]
    (home / "pipeline.yaml").write_text(yaml.safe_dump({**experiment, "steps": 2}))
    plan = json.loads((home / "across.json").read_text())
    training = plan["tasks"]["actor_training"]
    (_, layers), devices = training["replicas"][0]["stages"][0]["layers"], ("alpha/cpu/0", "beta/cpu/0")
    parts = ([0, layers // 2], [layers // 2, layers])
    stages = [{"devices": [device], "layers": part} for device, part in zip(devices, parts, strict=True)]
    samples = sum(replica["samples"] for replica in training["replicas"])
    training["replicas"], training["micro_batch"] = [{"samples": samples, "stages": stages}], 32
    (group,) = (each for each in plan["groups"] if "actor_training" in each["tasks"])
    group["devices"] = [*devices]
    plan["site_order"] = ["alpha", "beta", "gamma"]  # as the ranks stand, whichever led the plan
    plan["weight_sync"]["routes"] = [{"from": site, "to": "gamma"} for site in ("alpha", "beta")]
    (home / "pipeline.json").write_text(json.dumps(plan))


def with_paths(experiment: dict[str, Any]) -> dict[str, Any]:
    """Return an experiment of the checkout for a file beside it."""
    return {**experiment, "topology": in_checkout(experiment["topology"])}


def devices_of(task: dict[str, Any]) -> list[str]:
    return sorted(device for replica in task["replicas"] for stage in replica["stages"] for device in stage["devices"])


def assert_trained(run: Path) -> None:
    """Every step is there with its reward, and real engines made it."""
    summary, rows = json.loads((run / "summary.json").read_text()), lines(run / "metrics.jsonl")
    assert summary["steps"] == STEPS
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert all(0 < row["reward"] < 1 for row in rows)
    assert {"megatron-core", "vllm"} <= set(summary["engines"])
    assert set(summary["sites"]) == set(SITES)
    assert len({row["digest"] for row in summary["weight_versions"]}) > STEPS


def assert_jobs(run: Path) -> None:
    """The ranks were one gang, beta's replica a task of an array; gamma, which hands out whole nodes, had one job."""
    submitted = [event for event in lines(run / "events.jsonl") if event["kind"] == "submitted"]
    gangs = [(site, "gang", "gang") for site in SITES]
    arrays = [("beta", "array-cpu", "array")]
    assert sorted((each["site"], each["job"], each["job_kind"]) for each in submitted) == sorted(gangs + arrays)
    assert (run / "logs/alpha/actor_training-1.log").is_file()
    assert list((run / "logs/beta").glob("array-cpu-*_0.log"))
    (log,) = (run / "logs/gamma").glob("gang-*.log")
    assert re.search(r"actor_generation-\d ended with exit code 0", log.read_text())
