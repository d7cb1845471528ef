"""The measured links: what is written is read, the worse direction speaks, and an experiment has what it names."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from hetrl.describe.measured import write_measured
from hetrl.describe.measured_files import parse, read_all
from hetrl.describe.measured_links import (
    MeasuredLinks,
    Probed,
    Throughput,
    Unprobed,
    delay_and_gbps,
    file_name,
    percentile,
    write_measured_links,
)
from hetrl.errors import UsageError
from hetrl.problem import read_problem
from launch.verbs.planning import problem_at
from tests.launch.launch_cases import ROOT
from tests.launch.measure.probe_cases import WHEN, measured_links, probed
from tests.measure.profile_cases import measured

positive = st.floats(1e-9, 1e9)
words = st.text(max_size=20)
throughputs = st.builds(
    Throughput, st.integers(1, 64), positive, st.lists(st.floats(0, 1e6), min_size=1, max_size=4).map(tuple)
)
links = st.builds(
    Probed,
    source=words,
    target=words,
    way=words,
    round_trip_ms=st.lists(positive, min_size=1, max_size=4).map(tuple),
    throughput=st.lists(throughputs, min_size=1, max_size=3).map(tuple),
)
files = st.builds(
    MeasuredLinks,
    measured_at=st.datetimes(datetime(2000, 1, 1), datetime(2100, 1, 1)).map(
        lambda time: time.replace(microsecond=0, tzinfo=UTC)
    ),
    command=words,
    links=st.lists(links, max_size=3).map(tuple),
    nodes=st.lists(links, max_size=1).map(tuple),
    skipped=st.lists(st.builds(Unprobed, words, words), max_size=2).map(tuple),
)


@given(files)
def test_what_is_written_is_read(one: MeasuredLinks) -> None:
    assert parse(json.loads(json.dumps(one.to_json())), "here") == one


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"links": [{"source": "alpha"}]}, "links.0.target"),
        ({"measured_at": "2026-11-21T12:00:00"}, "measured_at"),
        ({"extra": 1}, "extra"),
        ({"format": "hetrl-links/2"}, r'"hetrl-links/1" \(`hetrl probe`\), found hetrl-links/2'),
    ],
)
def test_what_is_wrong_is_refused_with_its_place(change: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says) as error:
        parse({**measured_links(probed("alpha", "beta")).to_json(), **change}, "some/file.json")
    assert str(error.value).startswith("some/file.json: ")


def test_a_direction_is_as_good_as_its_best_streams_and_half_of_its_median_round_trip() -> None:
    one = probed("alpha", "beta", gbps=2.0, delay_ms=5.0)
    assert (one.delay_ms, one.best.streams, one.best.gbps) == (5.0, 4, pytest.approx(2.0))


@given(st.lists(positive, min_size=1, max_size=9), st.floats(0, 100))
def test_a_percentile_lies_between_the_samples(samples: list[float], percent: float) -> None:
    assert min(samples) <= percentile(samples, percent) * (1 + 1e-12)
    assert percentile(samples, percent) <= max(samples) * (1 + 1e-12)
    assert (percentile(samples, 0), percentile(samples, 100)) == (min(samples), max(samples))


def test_the_worse_direction_of_the_latest_measurements_speaks_for_a_link() -> None:
    old = measured_links(probed("alpha", "beta", 9.0, 1.0), probed("beta", "alpha", 3.0, 4.0))
    latest = measured_links(probed("alpha", "beta", 5.0, 2.0), measured_at=WHEN + timedelta(days=1))
    for order in ([old, latest], [latest, old]):
        assert delay_and_gbps(order) == {frozenset(("alpha", "beta")): (4.0, pytest.approx(3.0))}


def test_a_file_is_named_by_its_minute() -> None:
    assert file_name(WHEN) == "links-2026-11-21-1200.json"


def test_a_directory_gives_machines_and_links(tmp_path: Path) -> None:
    (tmp_path / "alps.json").write_text(json.dumps({"format": "hetrl-inventory/1"}))
    write_measured(tmp_path / "one.json", measured())
    write_measured_links(tmp_path / "deeper" / "two.json", measured_links(probed("alpha", "beta")))
    found = read_all([tmp_path, tmp_path / "deeper"])
    assert list(found.values()) == [measured(), measured_links(probed("alpha", "beta"))]


def experiment(directory: Path, measured_line: str) -> Path:
    text = (ROOT / "configs" / "quickstart.yaml").read_text()
    assert text.count("topology:\n") == 1
    path = directory / "try.yaml"
    path.write_text(text.replace("topology:\n", f"topology:\n{measured_line}"))
    return path


def test_measured_links_win_over_written_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.chdir(ROOT)
    found = measured_links(probed("beta", "alpha", 0.5, 30.0), probed("alpha", "elsewhere", 1.0, 1.0))
    write_measured_links(tmp_path / "links.json", found)
    without, named = (read_problem(experiment(tmp_path, line)) for line in ("", "  measured: [links.json]\n"))
    link = named.topology.link("alpha", "beta")
    assert link is not None and (link.delay_ms, link.gbps) == (30.0, pytest.approx(0.5))
    for pair in (("alpha", "gamma"), ("beta", "gamma")):
        assert named.topology.link(*pair) == without.topology.link(*pair)
    assert len(named.topology.links) == len(without.topology.links)
    assert named.digests["topology"] != without.digests["topology"]

    old = measured_links(probed("alpha", "beta"), measured_at=datetime.now(UTC) - timedelta(days=8))
    write_measured_links(tmp_path / "links.json", old)
    problem_at(tmp_path / "try.yaml")
    assert "measure again with `hetrl probe`" in capsys.readouterr().err
