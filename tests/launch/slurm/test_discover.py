"""`hetrl discover` with programs that answer as a cluster's do."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from hetrl.describe.inventory import read_inventory
from launch.cli import main
from launch.slurm.discover import inventory_table
from launch.slurm.text import parse_discovery

RECORDED = Path(__file__).parents[2] / "golden" / "slurm"


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """A login node: `bash` prints what 22.05 printed; `ssh dead` fails."""
    programs = {
        "scontrol": "exit 1",
        "bash": f"cat {RECORDED / '22.05.txt'}",
        "ssh": "echo 'ssh: Could not resolve hostname dead' >&2; exit 255",
    }
    for name, body in programs.items():
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def site(directory: Path, name: str, **keys: object) -> str:
    path = directory / f"{name}.yaml"
    path.write_text(json.dumps({"name": name, **keys}))
    return str(path)


def test_what_a_site_has_is_written_and_shown(cluster, capsys):
    assert main(["discover", site(cluster, "alps", gres={"a100": "a100-80gb"})]) == 0
    shown = capsys.readouterr()
    assert "a100" in shown.out
    assert "l4" in shown.out
    assert shown.err == "alps: measured into topology/measured/alps.json\n"
    assert len(read_inventory(Path("topology/measured/alps.json")).nodes) == 3


def test_names_that_nobody_mapped_are_asked_for(cluster, capsys):
    assert main(["discover", "--json", site(cluster, "alps")]) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["alps"]["cluster"] == "site-a"
    assert "gres: {a100: NAME}" in shown.err


def test_slices_that_are_mapped_to_the_whole_gpu_are_refused(cluster, capsys):
    assert main(["discover", site(cluster, "alps", gres={"a100_3g.20gb": "a100-40gb"})]) == 2
    assert "write `gres: {a100_3g.20gb: a100-40gb-3g.20gb}`" in capsys.readouterr().err


def test_names_that_a_cluster_gives_are_shown_as_they_are():
    found = parse_discovery((RECORDED / "22.05.txt").read_text(), "[alps]", "now")
    node = replace(found.nodes[0], gpus={"[a100]": 4}, gpus_used={}, partitions=("gpu", "[/x]"))
    console = Console(file=io.StringIO(), width=120)
    console.print(inventory_table([replace(found, nodes=(node,)), replace(found, site="[jsc]", nodes=())]))
    assert "[jsc]" in console.file.getvalue()
    assert re.search(r"\[alps\] .* \[a100\] .* gpu, \[/x\]", console.file.getvalue())


def test_one_site_that_cannot_be_reached_leaves_the_other(cluster, capsys):
    files = [site(cluster, "alps", gres={"a100": "a100-80gb"}), site(cluster, "jsc", ssh="dead")]
    assert main(["discover", *files]) == 5
    assert "jsc: ssh dead failed: ssh: Could not resolve hostname dead" in capsys.readouterr().err
    assert Path("topology/measured/alps.json").exists()
    assert main(["discover", files[1]]) == 4
