"""What `hetrl doctor` asks a site, and what it makes of the answers."""

from __future__ import annotations

import io
import json
import socket
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from hetrl.describe.container import Container
from hetrl.describe.sites import SiteFile
from hetrl.runtime.weights.tiny_model import write_tiny_model
from lab.lab import ROOT
from lab.quickstart import QUICKSTART, changed
from launch.cli import main
from launch.findings import Finding, Wish
from launch.remote import parse
from launch.slurm.preconditions import judge, questions
from launch.verbs.doctor import findings_table
from tests.launch.remote_cases import part

RECORDED = Path(__file__).parents[2] / "golden" / "slurm"
SLURM = (RECORDED / "22.05.txt").read_text()
VERSIONS = {"torch": "2.13.0", "vllm": "0.32.0"}
WISH = Wish(walltime_seconds=3600.0, versions=VERSIONS)
SITE = SiteFile(
    name="alps",
    scratch="/scratch",
    partitions=("gpu",),
    gres={"a100": "a100-80gb"},
    nodes=({"name": "a100", "gpu": "a100-80gb", "gpus": 4, "count": 2},),
)
GOOD = {
    "clock": "1000.5",
    "programs": "",
    "controller": "Slurmctld(primary) at a is UP",
    "scratch": "Filesystem 1024-blocks Used Available Capacity Mounted on\n/dev/x 9e9 0 900000000 1% /scratch",
    "environment": json.dumps(
        {"python": "3.11.7", "torch": "2.13.0+cu130", "vllm": "0.32.0", "megatron-core": "0.16.1"}
    ),
}


def examined(site: SiteFile = SITE, wish: Wish = WISH, egress: int | None = None, **changes: str) -> dict[str, Finding]:
    parts = {**GOOD, **changes}
    answer = "".join(part(name, f"{text}\n") for name, text in parts.items()) + SLURM
    answer += "" if egress is None else part("egress", "bash: connect: Connection refused\n" * egress, egress)
    return {finding.what: finding for finding in judge(site, answer, wish, 1000.0, 1001.0)}


def test_a_site_where_all_holds():
    found = examined()
    assert {finding.verdict for finding in found.values()} == {"ok"}
    assert found["nodes a100"].found == "2 nodes with 4 x a100-80gb in service"
    assert found["packages"].found == "python 3.11.7, torch 2.13.0+cu130, megatron-core 0.16.1, vllm 0.32.0"


@pytest.mark.parametrize(
    ("changes", "what", "verdict", "found", "remedy"),
    [
        ({"clock": "1090"}, "clock", "failed", "89 s off", "NTP"),
        ({"clock": "date: not found"}, "clock", "warning", "no answer", "date"),
        ({"programs": "sbatch\nrsync"}, "programs", "failed", "sbatch, rsync", "module"),
        ({"controller": "Slurmctld(primary) at a is DOWN"}, "slurmctld", "failed", "DOWN", "`sinfo`"),
        ({"scratch": "mkdir: cannot create '/scratch': Permission denied"}, "scratch", "failed", "denied", "writable"),
        ({"scratch": "bash: line 9: /s/.hetrl-1: Disk quota exceeded"}, "scratch", "failed", "quota", "make room in /"),
        ({"scratch": "F 1 2 3 4 M\n/dev/x 9 0 1000000 1% /s"}, "scratch", "warning", "1.0 GB free", "room"),
        ({"scratch": "F 1 2 3 4 M\n/dev/x 9 9 40 100% /s"}, "scratch", "failed", "is full: 0.0 GB free", "room"),
        ({"setup": "module load gcc\nconda x"}, "setup", "failed", "fails: module load gcc; conda x", "`module avail`"),
        ({"environment": "bash: python3: command not found"}, "python", "failed", "not found", "set python"),
        ({"environment": '{"python": "3.11.7", "vllm": null}'}, "packages", "failed", "vllm", "environment.yml"),
        ({"environment": '{"python": "3.11.7", "vllm": "0.9.0"}'}, "versions", "warning", "not 0.32.0", "log-probs"),
    ],
)
def test_each_thing_that_may_be_wrong(changes, what, verdict, found, remedy):
    finding = examined(**changes)[what]
    assert finding.verdict == verdict
    assert found in finding.found
    assert remedy in finding.remedy


@pytest.mark.parametrize(("programs", "what"), [("", "slurmctld"), ("scontrol", "inventory")])
def test_a_controller_that_was_away_for_a_moment_is_one_that_does_not_answer(programs, what):
    """It is asked again then; a site without Slurm is not."""
    said = {**GOOD, "programs": programs}
    answer = "".join(part(name, f"{text}\n") for name, text in said.items())
    (finding,) = [one for one in judge(SITE, answer, WISH, 1000.0, 1001.0) if "Slurm said nothing about" in one.found]
    assert (finding.what, finding.verdict) == (what, "failed")


def test_what_a_site_says_is_shown_as_it_says_it():
    said, remedy = "nodes cpu-[a01-a04] are down: /scratch/[/x] :warning:", "see [bold]"
    console = Console(file=io.StringIO(), width=120)
    console.print(findings_table([Finding("alps", "node [a]", "failed", said, remedy)]))
    shown = console.file.getvalue()
    assert all(text in shown for text in (said, f"-> {remedy}", "node [a]"))


def test_models_that_are_not_there():
    wish = replace(WISH, models=("/data/actor", "/data/reward"))
    assert examined(wish=wish)["models"].found == "/data/actor, /data/reward"
    finding = examined(wish=wish, models="/data/reward")["models"]
    assert (finding.verdict, finding.found) == ("failed", "no config.json in /data/reward")


def test_models_are_looked_for_where_the_sites_file_says(tmp_path):
    site = SITE.model_copy(update={"paths": {"/data": str(tmp_path), "/data/old": "/nowhere"}})
    assert [site.place(name) for name in ("/data/actor/7b", "/data", "/database/x", "/data/old/x", "qwen3-8b")] == [
        *(str(tmp_path / "actor" / "7b"), str(tmp_path), "/database/x", "/nowhere/x", "qwen3-8b")
    ]
    wish = replace(WISH, models=("/data/actor",))
    assert examined(site, wish=wish)["models"].found == str(tmp_path / "actor")
    missing = examined(site, wish=wish, models="/x/actor")["models"]
    assert (missing.verdict, "paths in the site's file" in missing.remedy) == ("failed", True)


def test_an_interpreter_that_does_not_start_in_a_container_is_not_blamed_on_python():
    site = SITE.model_copy(update={"container": Container(image="/images/it's.sif")})
    remedy = examined(site, environment="FATAL: could not open image")["python"].remedy
    assert remedy.startswith("make `apptainer exec '/images/it'\"'\"'s.sif' python3` start there, or correct container")


def test_a_login_node_unlike_the_nodes_stands_in_nobodys_way():
    contained = SITE.model_copy(update={"container": Container(image="/images/x.sif")})
    for site, said in (
        (SITE, "bash: /envs/aarch64/bin/python: cannot execute binary file: Exec format error"),
        (contained, "bash: apptainer: command not found"),
    ):
        finding = examined(site, environment=said)["python"]
        assert (finding.verdict, said in finding.found, "--deep" in finding.remedy) == ("warning", True, True)
    assert examined(environment="bash: python3: command not found")["python"].verdict == "failed"


def test_a_local_run_needs_no_slurm_but_its_models(tmp_path, capsys):
    assert main(["doctor", str(QUICKSTART), "--json"]) == 0
    found = {(each["site"], each["what"]): each["verdict"] for each in json.loads(capsys.readouterr().out)}
    assert found == {(site, "packages"): "ok" for site in ("alpha", "beta", "gamma")}
    assert main(["doctor", str(QUICKSTART), "--deep"]) == 2
    assert "--deep: these sites are this machine" in capsys.readouterr().err
    write_tiny_model(tmp_path / "model")
    config = changed(tmp_path, model={"architecture": str(tmp_path / "model"), "weights": "/nowhere/model"})
    (tmp_path / "topology").symlink_to(ROOT / "topology")
    assert main(["doctor", str(config)]) == 1
    assert capsys.readouterr().out.count("/nowhere/model") == 3


@pytest.mark.parametrize(
    ("waiting", "found"),
    [
        (part("queue", "gpu\ngpu,short\nshort\n"), "6 of 8 GPUs idle, 2 jobs wait"),
        (part("queue", "gpu\n"), "6 of 8 GPUs idle, 1 job waits"),
        (part("queue", "slurm_load_jobs error\n", 1), "6 of 8 GPUs idle"),
    ],
)
def test_how_busy_the_partitions_are(waiting, found):
    answer = waiting + SLURM
    queue = next(one for one in judge(SITE, answer, WISH, 0.0, 1.0) if one.what == "queue")
    assert (queue.verdict, queue.found) == ("ok", found)


def test_data_is_looked_for_where_a_site_may_lead():
    wish = replace(WISH, data="/data/x.jsonl")
    site = SITE.model_copy(update={"paths": {"/data": "/work"}})
    (found,) = (one for one in judge(site, part("data", code=1), wish, 0.0, 1.0) if one.what == "data")
    assert (found.verdict, found.found) == ("failed", "/work/x.jsonl cannot be read")
    assert "data=/work/x.jsonl\n" in questions(site, wish)
    assert "data=''\n" in questions(site.model_copy(update={"engines": ("vllm",)}), wish)


def test_walltime_above_the_partitions_limit():
    finding = examined(SITE.model_copy(update={"partitions": ("short",)}))["partition short"]
    assert (finding.verdict, finding.found) == ("failed", "allows 0.5 h, asked 1 h")
    assert "launch.walltime" in finding.remedy


def test_partition_that_is_not_there():
    finding = examined(SITE.model_copy(update={"partitions": ("gpus",)}))["partition gpus"]
    assert finding.verdict == "failed"
    assert "there are gpu, short" in finding.remedy


def test_more_nodes_than_are_in_service():
    more = SITE.model_copy(update={"nodes": (SITE.nodes[0].model_copy(update={"count": 3}),)})
    finding = examined(more)["nodes a100"]
    assert (finding.verdict, finding.found) == ("failed", "2 of 3 nodes with 4 x a100-80gb are in service")


def test_member_of_a_federation_must_be_named():
    text = (RECORDED / "22.05-federation.txt").read_text()

    def found(site: SiteFile) -> Finding:
        return next(one for one in judge(site, text, WISH, 0.0, 1.0) if one.what == "cluster")

    assert (found(SITE).verdict, found(SITE).remedy) == ("failed", "set cluster: beta in the site's file")
    named = found(SITE.model_copy(update={"cluster": "beta"}))
    assert (named.verdict, named.found) == ("ok", "beta, in a federation")


def test_relay_that_does_not_answer():
    site = SITE.model_copy(update={"egress": "relay", "relay": "relay.example.org:7000"})
    assert examined(site, egress=1)["relay"].verdict == "failed"
    assert examined(site, egress=0)["relay"].verdict == "ok"


def test_the_questions_are_one_script_that_any_shell_can_run(tmp_path):
    where = {"scratch": str(tmp_path / "it's here"), "egress": "relay", "relay": "127.0.0.1:1"}
    lines = ("here=1", '[ "$here" = 1 ]  # an earlier line counts', "not_there")
    site = SITE.model_copy(update={**where, "modules": ("a b",), "setup": lines})
    (tmp_path / "config.json").touch()
    wish = replace(WISH, models=(str(tmp_path), "/no where/model"), data=str(tmp_path / "no data"))
    script = questions(site, wish)
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0
    answer = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout
    parts = parse(answer)
    assert float(parts["clock"].text) > 0
    assert parts["scratch"].text.strip().splitlines()[-1].split()[3].isdigit()
    assert parts["egress"].code == 1
    assert "environment" in parts
    assert parts["setup"].text == "module load 'a b'\nnot_there\n"
    assert parts["models"].text == "/no where/model\n"
    assert parts["data"].code == 1
    with socket.create_server(("127.0.0.1", 0)) as relay:
        target = f"127.0.0.1:{relay.getsockname()[1]}"
        script = questions(site.model_copy(update={"relay": target}), replace(wish, data=str(tmp_path)))
        answer = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout
        assert parse(answer)["egress"].code == parse(answer)["data"].code == 0
