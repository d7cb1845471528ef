"""The fit: its committed file is what it writes, it finds known numbers again, and it meets the published points."""

from __future__ import annotations

import statistics
from dataclasses import astuple, replace
from importlib import resources
from pathlib import Path

import pytest
import yaml

from hetrl.cost.efficiency import FILE, Engine, Trainer, calibrated, parse
from hetrl.gpus import gpu_catalogue
from hetrl.measure.calibrate import document, fit, rounded
from hetrl.measure.points import Point, points_of, predicted, read_points, residuals
from hetrl.workload import architecture_catalogue
from launch.cli import main


def test_an_entry_with_lists_is_one_point_per_place() -> None:
    entry = {"gpu": "l4", "architecture": "llama-1-30b", "batch": [2, 85], "milliseconds": [4.5, 13], "source": "s"}
    first, second = points_of({"decode-layer": [entry]})
    assert first == Point(
        "decode-layer", {"gpu": "l4", "architecture": "llama-1-30b", "batch": 2}, "milliseconds", 4.5, "s"
    )
    assert (second.question["batch"], second.value) == (85, 13)


def test_every_point_names_known_things_and_a_source() -> None:
    points = read_points()
    assert len(points) == 57
    assert sum(point.own for point in points) == 15
    for point in points:
        assert point.gpu in gpu_catalogue()
        assert point.question["architecture"] in architecture_catalogue()
        assert point.source
        assert point.value > 0


def test_the_fit_meets_the_published_points() -> None:
    found = residuals(read_points(), calibrated())
    errors = [abs(one.error) for one in found]
    assert statistics.median(errors) <= 0.08
    assert max(errors) <= 0.25


def test_the_fit_finds_the_numbers_that_made_the_points() -> None:
    serving = {"decode": 0.7, "prefill": 0.6}
    trained = {"training": 0.5}
    truth = replace(
        calibrated(),
        shares={
            **calibrated().shares,
            "a100-80gb": serving | trained,
            "l4": {"decode": 0.9, "prefill": 0.5},
            "h100": {"decode": 0.6, "prefill": 0.5, "training": 0.4},
        },
        engines={
            "vllm-0.6": Engine(0.005),
            "vllm-0.23": Engine(0.001),
            "vllm-0.30": Engine(0.002),
            "vllm-0.32": Engine(0.003, 4e-5, 0.6),
        },
        decode_all_reduce=4e-5,
        trainers={
            "torchtitan": Trainer(1.2),
            "prime-rl": Trainer(0.8),
            "llmq": Trainer(1.1),
            "hetrl": Trainer(0.9, 1e-3),
        },
        attention=0.4,
        activation_traffic=0.7,
    )
    again = fit([replace(point, value=predicted(point, truth)) for point in read_points()])
    for gpu in ("a100-80gb", "l4", "h100"):
        assert again.shares[gpu] == pytest.approx(truth.shares[gpu], rel=0.03)
    for name in ("vllm-0.6", "vllm-0.32"):
        assert astuple(again.engines[name]) == pytest.approx(astuple(truth.engines[name]), rel=0.05)
    assert again.decode_all_reduce == pytest.approx(4e-5, rel=0.1)
    for name, given in truth.trainers.items():
        assert astuple(again.trainers[name]) == pytest.approx(astuple(given), rel=0.05)
    assert again.attention == pytest.approx(0.4, rel=0.1)


def test_what_our_own_engines_did_leaves_the_published_numbers_alone() -> None:
    points = read_points()
    slower = [replace(one, value=one.value * 2) if one.own else one for one in points]
    before, after = (fit(one) for one in (points, slower))
    assert after.shares == before.shares
    assert "h200" not in before.shares
    assert after.trainers["llmq"] == before.trainers["llmq"]
    assert after.trainers["hetrl"].layer_seconds > 1.5 * before.trainers["hetrl"].layer_seconds


def test_measurements_without_our_own_engines_can_be_fitted() -> None:
    found = fit([point for point in read_points() if not point.own])
    assert "hetrl" not in found.trainers
    assert found.rates("l4").overhead.layer == 0.0


def test_what_a_left_out_point_told_alone_is_inferred() -> None:
    points = read_points()
    (alone,) = (point for point in points if point.kind == "prefill-layer" and point.gpu == "l4")
    found = fit(points, without=alone)
    assert "prefill" not in found.shares["l4"]
    assert found.of("l4").inferred == ("prefill", "training")
    assert predicted(alone, found) == pytest.approx(alone.value, rel=0.25)


def test_the_committed_file_is_what_the_command_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written = tmp_path / "efficiencies.yaml"
    assert main(["calibrate", "-o", str(written)]) == 0
    assert "median" in capsys.readouterr().out
    committed = yaml.safe_load(resources.files("hetrl.catalogue").joinpath(FILE).read_text())
    fresh = yaml.safe_load(written.read_text())
    assert fresh["shares"].keys() == committed["shares"].keys()
    for gpu, values in committed["shares"].items():
        assert fresh["shares"][gpu] == pytest.approx(values, rel=1e-3)
    assert [one["point"] for one in fresh["residuals"]] == [one["point"] for one in committed["residuals"]]


def test_the_file_holds_the_numbers_and_each_residual() -> None:
    points = read_points()
    numbers = rounded(calibrated())
    found = residuals(points, numbers)
    text = yaml.safe_load(document(numbers, found))
    assert parse(text) == numbers
    assert len(text["residuals"]) == len(points)
    assert text["residuals"][0]["error"] == pytest.approx(found[0].error, abs=5e-4)


def test_measurements_that_cannot_be_read_are_a_usage_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = tmp_path / "points.yaml"
    broken.write_text("generation:\n  - {gpu: l4, architecture: qwen2.5-7b, source: x}\n")
    assert main(["calibrate", "--points", str(broken), "-o", str(tmp_path / "out.yaml")]) == 2
    assert "tokens_per_second" in capsys.readouterr().err
    assert not (tmp_path / "out.yaml").exists()
