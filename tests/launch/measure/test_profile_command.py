"""`hetrl profile` around its measuring process: a script stands in for the interpreter that measures."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

import launch.measure.machine
from hetrl.describe.measured_files import read_file
from launch.cli import main

A100 = {"host": "node1", "device": "NVIDIA A100-SXM4-80GB", "devices": 1, "memory_gb": 85.0}
LAYER = {"architecture": "qwen3-8b", "dtype": "bf16", "batch": 1, "context": 1024}


def start(device: str | None = "cuda", machine: dict[str, Any] = A100) -> dict[str, Any]:
    return {"device": device, "machine": machine, "software": {"torch": "2"}, "kinds": ["copy", "layer", "all-reduce"]}


def measurement(kind: str, question: dict[str, Any], seconds: float, use: str = "record") -> dict[str, Any]:
    unit = "bytes" if kind in ("copy", "all-reduce") else "flops"
    values = {"unit": unit, "work": 1e9, "warm_up": 1, "seconds": [seconds, seconds], "use": use}
    return {"measurement": {"kind": kind, "question": question, **values}}


LINES = [
    start(),
    {"begin": "copy"},
    measurement("copy", {"direction": "inside", "bytes": 1000}, 0.001),
    {"begin": "layer"},
    measurement("decode layer", LAYER, 3e-4, "fit"),
    measurement("decode layer", {**LAYER, "batch": 8}, 3.2e-4, "held out"),
    {"begin": "all-reduce"},
    {"skipped": {"kind": "all-reduce", "why": "this machine shows one GPU; an all-reduce needs two"}},
    {"done": True},
]


@pytest.fixture
def measuring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Return a function that makes the measuring process print these lines, then run a bash command."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)

    def prints(lines: list[dict[str, Any]], after: str = "true") -> None:
        (tmp_path / "lines").write_text("".join(json.dumps(line) + "\n" for line in lines))
        script = tmp_path / "python"
        script.write_text(f'#!/bin/bash\necho "$@" > {tmp_path}/argv\ncat {tmp_path}/lines\n{after}\n')
        script.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(script))

    return prints


def test_the_file_holds_the_samples_and_what_follows(measuring, tmp_path: Path, capsys) -> None:
    measuring(LINES)
    assert main(["profile", "--quick"]) == 0
    (path,) = (tmp_path / "topology" / "measured").iterdir()
    found = read_file(path)
    assert path.name == f"node1-a100-80gb-{found.measured_at:%Y-%m-%d}.json"
    assert (found.gpu, found.command, len(found.measurements)) == ("a100-80gb", "hetrl profile --quick", 3)
    assert found.shares.keys() == {"decode"}
    assert found.measurements[1].seconds == (3e-4, 3e-4)
    assert [check.name for check in found.checks] == ["decode layer bf16, batch 8, context 1024"]
    assert [one.kind for one in found.skipped] == ["all-reduce"]
    printed = capsys.readouterr()
    assert "Prediction of sizes not used in the fit" in printed.out
    assert "not measured: all-reduce: this machine shows one GPU" in printed.out
    assert max(map(len, printed.out.splitlines())) <= 80
    assert str(path.relative_to(tmp_path)) in printed.err


def test_json_is_the_file(measuring, tmp_path: Path, capsys) -> None:
    measuring(LINES)
    assert main(["profile", "--json", "--out", str(tmp_path / "here.json")]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads((tmp_path / "here.json").read_text())


@pytest.mark.parametrize(("options", "device"), [([], "auto"), (["--gpu", "cpu"], "cpu"), (["--gpu", "h100"], "cuda")])
def test_the_measuring_process_gets_the_device(measuring, tmp_path: Path, options: list[str], device: str) -> None:
    measuring([start("cpu"), *LINES[1:]])
    assert main(["profile", "--architecture", "qwen3-8b", *options]) == 0
    argv = (tmp_path / "argv").read_text().split()
    assert argv[:4] == ["-m", "hetrl.runtime.instruments.profile", "--device", device]
    assert argv[-2:] == ["--architecture", "qwen3-8b"]


def test_what_a_deadline_cuts_off_says_so_and_the_rest_is_kept(measuring, tmp_path, monkeypatch, capsys) -> None:
    measuring(LINES[:4], after="printf '{\"measurement\": '; sleep 600 & sleep 600")
    monkeypatch.setitem(launch.measure.machine.DEADLINE_SECONDS, "full", 1.0)
    assert main(["profile", "--out", str(tmp_path / "here.json")]) == 0
    found = read_file(tmp_path / "here.json")
    assert [one.kind for one in found.measurements] == ["copy"]
    assert [one.kind for one in found.skipped] == ["layer", "all-reduce"]
    assert {one.why for one in found.skipped} == {"the deadline of 1 s passed"}


def test_a_measuring_process_that_dies_says_its_last_words(measuring, tmp_path, capsys) -> None:
    measuring(LINES[:4], after='echo "RuntimeError: the card fell off" >&2; exit 1')
    assert main(["profile", "--out", str(tmp_path / "here.json")]) == 0
    assert "the card fell off" in read_file(tmp_path / "here.json").skipped[0].why
    measuring([], after='echo "ImportError: libcudart.so" >&2; exit 1')
    assert main(["profile"]) == 1
    assert "ImportError: libcudart.so" in capsys.readouterr().err


def test_a_share_that_no_gpu_reaches_is_left_out(measuring, tmp_path, capsys) -> None:
    fast = [measurement("decode layer", LAYER, 1e-5, "fit")]
    measuring([start(), *fast, {"done": True}])
    assert main(["profile", "--out", str(tmp_path / "here.json")]) == 0
    found = read_file(tmp_path / "here.json")
    assert found.shares == {}
    assert "is the type right (--gpu)?" in found.skipped[0].why
    measuring([start("cpu"), *fast, {"done": True}])
    assert main(["profile", "--out", str(tmp_path / "here.json")]) == 0
    assert read_file(tmp_path / "here.json").shares["decode"] > 1


@pytest.mark.parametrize(
    ("lines", "options", "exit_code", "says"),
    [
        (
            [start(machine={**A100, "device": "NVIDIA Quantum 9"})],
            [],
            2,
            '"NVIDIA Quantum 9".*name the type with --gpu',
        ),
        ([start(None)], ["--gpu", "h100"], 2, "--gpu h100: torch sees no CUDA device on node1"),
        ([start(), {"done": True}], [], 1, "node1: nothing could be measured"),
        (LINES, ["--gpu", "a100-81gb"], 2, 'did you mean "a100-80gb"'),
        (LINES, ["--architecture", "qwen3-9b"], 2, 'did you mean "qwen3-8b"'),
        (LINES, ["--out", "lines/deeper"], 1, "lines: not a directory; name another place with --out"),
    ],
)
def test_errors_say_what_to_do(measuring, capsys, lines, options: list[str], exit_code: int, says: str) -> None:
    measuring(lines)
    assert main(["profile", *options]) == exit_code
    printed = capsys.readouterr()
    assert re.search(says, printed.err), printed.err


def test_a_file_that_cannot_be_written_is_an_error_after_the_figures(measuring, capsys) -> None:
    measuring(LINES, after="touch gone")  # a file where the directory was to be
    assert main(["profile", "--out", "gone/here.json"]) == 1
    printed = capsys.readouterr()
    assert "Prediction of sizes" in printed.out
    assert "cannot write what was measured (File exists); name a place with --out" in printed.err


def test_without_torch_the_target_that_installs_it_is_named(measuring, monkeypatch, capsys) -> None:
    measuring(LINES)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["profile"]) == 1
    assert "`make setup`" in capsys.readouterr().err
