"""The measured file: what is written is read, what is wrong is refused, and whose shares are in force."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from hetrl.cost.efficiency import calibrated
from hetrl.describe.measured import (
    Check,
    Exchange,
    Measured,
    Measurement,
    Skipped,
    file_name,
    gpu_of,
    merge,
    write_measured,
)
from hetrl.describe.measured_files import is_stale, parse, read_all, read_file
from hetrl.errors import UsageError
from hetrl.problem import read_problem
from launch.cli import main
from tests.launch.launch_cases import ROOT
from tests.measure.profile_cases import WHEN, measured

positive = st.floats(1e-9, 1e9)
words = st.text(max_size=20)
questions = st.dictionaries(words, st.one_of(words, st.integers(-(2**53), 2**53), positive), max_size=4)
measurements = st.builds(
    Measurement,
    kind=words,
    question=questions,
    unit=st.sampled_from(["flops", "bytes", "tokens"]),
    work=positive,
    warm_up=st.integers(0, 9),
    seconds=st.lists(positive, min_size=1, max_size=5).map(tuple),
    use=st.sampled_from(["fit", "held out", "record"]),
)
files = st.builds(
    Measured,
    gpu=st.sampled_from(["cpu", "a100-80gb", "l4"]),
    measured_at=st.datetimes(datetime(2000, 1, 1), datetime(2100, 1, 1)).map(
        lambda time: time.replace(microsecond=0, tzinfo=UTC)
    ),
    command=words,
    machine=questions,
    software=st.dictionaries(words, words, max_size=3),
    measurements=st.lists(measurements, max_size=3).map(tuple),
    skipped=st.lists(st.builds(Skipped, words, words), max_size=2).map(tuple),
    shares=st.dictionaries(st.sampled_from(["decode", "prefill", "training"]), positive),
    checks=st.lists(st.builds(Check, words, positive, positive), max_size=2).map(tuple),
    exchange=st.none() | st.builds(Exchange, words, st.integers(2, 8), st.floats(0, 1e3), positive),
)


@given(files)
def test_what_is_written_is_read(one: Measured) -> None:
    assert parse(json.loads(json.dumps(one.to_json())), "here") == one


def test_a_file_is_written_and_read(tmp_path: Path) -> None:
    write_measured(tmp_path / "one.json", measured())
    assert read_file(tmp_path / "one.json") == measured()
    assert [path.name for path in tmp_path.iterdir()] == ["one.json"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"format": "hetrl-plan/1"}, "hetrl-measured/1"),
        ({"shares": {"decode": -0.1}}, "shares"),
        ({"shares": {"decode": float("nan")}}, "shares"),
        ({"shares": {"dcode": 0.1}}, "dcode"),
        ({"gpu": "a100-80"}, 'did you mean "a100-80gb"'),
        ({"measured_at": "yesterday"}, "measured_at"),
        ({"extra": 1}, "extra"),
        ({"measurements": [{"kind": "copy"}]}, "measurements.0"),
    ],
)
def test_what_is_wrong_is_refused_with_its_place(change: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says) as error:
        parse({**measured().to_json(), **change}, "some/file.json")
    assert str(error.value).startswith("some/file.json: ")


def test_a_measurement_without_samples_is_refused() -> None:
    document = json.loads(json.dumps(measured().to_json()))
    document["measurements"][0]["seconds"] = []
    with pytest.raises(UsageError, match="measurements.0.seconds"):
        parse(document, "x.json")


def test_median_spread_and_rate_come_from_the_samples() -> None:
    one = Measurement("copy", {}, "bytes", 12.0, 1, (1.0, 2.0, 3.0, 4.0, 5.0))
    assert (one.median_seconds, one.rate) == (3.0, 4.0)
    assert one.spread == pytest.approx((4.0 - 2.0) / 3.0)
    assert replace(one, seconds=(7.0,)).spread == 0.0


@given(st.timedeltas(timedelta(), timedelta(days=30)))
def test_a_file_is_stale_after_a_week(age: timedelta) -> None:
    assert is_stale(WHEN, WHEN + age) == (age > timedelta(days=7))


def test_the_latest_file_wins_phase_by_phase() -> None:
    old = measured(shares={"decode": 0.1, "training": 0.2})
    latest = measured(measured_at=WHEN + timedelta(days=1), shares={"decode": 0.3})
    other = measured(gpu="l4", shares={"prefill": 0.4})
    expected = {"a100-80gb": {"decode": 0.3, "training": 0.2}, "l4": {"prefill": 0.4}}
    assert merge([old, latest, other]) == merge([other, latest, old]) == expected
    assert merge([measured(shares={})]) == {}


def test_a_directory_gives_its_measured_files_alone(tmp_path: Path) -> None:
    (tmp_path / "alps.json").write_text(json.dumps({"format": "hetrl-inventory/1"}))
    with pytest.raises(UsageError, match="no measured file"):
        read_all([tmp_path])
    write_measured(tmp_path / "one.json", measured())
    assert read_all([tmp_path]) == {tmp_path / "one.json": measured()}


@pytest.mark.parametrize(
    ("device", "gpu"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA A100-PCIE-40GB", "a100-40gb"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA A10G", "a10g"),
        ("Tesla V100-SXM2-16GB", "v100"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("NVIDIA Quantum 9000", None),
        ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", "a100-80gb-3g.40gb"),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "h100-1g.10gb"),
        ("NVIDIA B200 MIG 1g.23gb", None),  # not the whole GPU
    ],
)
def test_a_gpu_is_known_by_the_name_of_its_driver(device: str, gpu: str | None) -> None:
    assert gpu_of(device) == gpu


def test_a_file_is_named_by_host_type_and_date() -> None:
    assert file_name("node 1.alps/x", "l4", WHEN) == "node-1.alps-x-l4-2026-11-02.json"
    assert file_name("", "cpu", WHEN) == "host-cpu-2026-11-02.json"


# --- whose shares are in force ----------------------------------------------------------------------------------------


def test_measured_wins_over_calibrated_and_inferred_and_can_be_taken_back() -> None:
    before = {gpu: (calibrated().of(gpu), calibrated().rates(gpu)) for gpu in ("a100-80gb", "h100", "cpu")}
    known = calibrated().with_measured({"a100-80gb": {"decode": 0.25, "training": 0.125}, "cpu": {"prefill": 3.0}})
    a100, cpu = known.of("a100-80gb"), known.of("cpu")
    assert (a100.decode, a100.training, a100.prefill) == (0.25, 0.125, before["a100-80gb"][0].prefill)
    assert (a100.measured, a100.inferred) == (("decode", "training"), ())
    assert (cpu.prefill, cpu.measured, cpu.inferred) == (3.0, ("prefill",), ("decode", "training"))
    assert known.rates("a100-80gb").decode_bytes == pytest.approx(2039e9 * 0.25)
    assert (known.of("h100"), known.rates("h100")) == before["h100"]  # what is inferred rests on published points alone
    known = known.with_measured({})
    assert {gpu: (known.of(gpu), known.rates(gpu)) for gpu in before} == before


PREDICT = ["predict", "--task", "generation", "--architecture", "qwen3-8b", "--gpu", "a100-80gb", "--response", "64"]


def test_predict_takes_measured_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "one.json"
    write_measured(file, measured(measured_at=datetime.now(UTC), shares={"decode": 0.2, "prefill": 0.2}))
    assert main([*PREDICT, "--json"]) == 0
    published = json.loads(capsys.readouterr().out)
    assert main([*PREDICT, "--json", "--measured", str(tmp_path)]) == 0
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert published["measured"] == {}
    assert found["measured"] == {"a100-80gb": ["decode", "prefill"]}
    assert found["seconds"] > 2 * published["seconds"]
    assert printed.err == ""
    assert main([*PREDICT, "--measured", str(file)]) == 0
    assert "measured: a100-80gb (decode, prefill)" in capsys.readouterr().out


def test_an_old_file_is_flagged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_measured(tmp_path / "one.json", measured(measured_at=datetime.now(UTC) - timedelta(days=8)))
    assert main([*PREDICT, "--measured", str(tmp_path / "one.json")]) == 0
    error = capsys.readouterr().err
    assert "one.json" in error
    assert "hetrl profile" in error


def experiment(directory: Path, measured_line: str) -> Path:
    text = (ROOT / "configs" / "paper-single-region.yaml").read_text()
    assert text.count("topology: {") == 1
    path = directory / "try.yaml"
    path.write_text(text.replace("topology: {", f"topology: {{{measured_line}"))
    return path


def test_an_experiment_names_its_measured_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    write_measured(tmp_path / "one.json", measured())
    without, named = (
        read_problem(experiment(tmp_path, "")),
        read_problem(experiment(tmp_path, "measured: [one.json], ")),
    )
    assert list(named.files.measured.values()) == [measured()]
    assert without.files.measured == {}
    assert named.digests["topology"] != without.digests["topology"]
    with pytest.raises(UsageError, match='topology.measured: there is no file "two.json"'):
        read_problem(experiment(tmp_path, "measured: [two.json], "))
