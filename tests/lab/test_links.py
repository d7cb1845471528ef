"""The links of the lab, with real packets: what tests of transport rely on."""

from __future__ import annotations

import json

import pytest

from lab.lab import Lab
from lab.probes import listening, ping
from lab.processes import LabError
from lab.shape import Link

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(300)]


def test_delay_is_of_each_direction(lab: Lab) -> None:
    lab.link("alpha", "beta", gbps=1, delay_ms=40)
    received, round_trips_ms = ping(lab, "alpha", "beta", "-c5", "-i0.2")
    assert received == 5
    assert 80 <= min(round_trips_ms) < 100


def test_jitter_spreads_round_trips(lab: Lab) -> None:
    lab.link("alpha", "beta", gbps=1, delay_ms=40, jitter_ms=30)
    _, round_trips_ms = ping(lab, "alpha", "beta", "-c20", "-i0.1")
    assert max(round_trips_ms) - min(round_trips_ms) > 10


@pytest.mark.parametrize("options", [(), ("--reverse",)], ids=["there", "back"])
def test_rate_holds_in_each_direction(lab: Lab, options: tuple[str, ...]) -> None:
    lab.link("alpha", "beta", gbps=0.1, delay_ms=2)
    with listening(lab, "beta", "iperf3", "--server", "--port=7000", "--forceflush"):
        client = ["iperf3", "--client=beta", "--port=7000", "--time=3", "--omit=1", "--json", *options]
        result = json.loads(lab.run("alpha-1", client).stdout)
    assert 60e6 < result["end"]["sum_received"]["bits_per_second"] < 110e6


def test_a_full_queue_drops(lab: Lab) -> None:
    lab.link("alpha", "beta", gbps=0.001, delay_ms=2, queue_bytes=5000)
    before = lab.stats()["alpha", "beta"].full
    received, _ = ping(lab, "alpha", "beta", "-c50", "-i0.001", "-s1400")
    assert 0 < received < 50
    assert lab.stats()["alpha", "beta"].full > before


def test_loss_takes_its_share(lab: Lab) -> None:
    lab.link("alpha", "beta", gbps=1, delay_ms=2, loss=0.3)
    before = lab.stats()["alpha", "beta"].lost
    received, _ = ping(lab, "alpha", "beta", "-c300", "-i0.002", "-q")
    assert 75 < received < 225  # 0.7 there and 0.7 back: 147 on average, standard deviation 9
    assert lab.stats()["alpha", "beta"].lost - before > 40


def test_cut_and_heal(lab: Lab) -> None:
    lab.link("alpha", "gamma", gbps=1, delay_ms=30)
    lab.cut("alpha", "gamma")
    assert ping(lab, "alpha", "gamma", "-c3", "-i0.1")[0] == 0
    assert ping(lab, "alpha", "beta", "-c3", "-i0.1")[0] > 0, "another link is cut too"
    lab.heal("gamma", "alpha")
    received, round_trips_ms = ping(lab, "alpha", "gamma", "-c3", "-i0.1")
    assert received == 3
    assert min(round_trips_ms) >= 60, "the link lost its shape"


def test_stats_count_bytes_of_each_direction(lab: Lab) -> None:
    lab.link("beta", "gamma", gbps=1, delay_ms=1)
    before = lab.stats()
    lab.run("beta", ["ssh", "gamma", "head -c 1000000 /dev/zero"])
    after = lab.stats()
    assert after["gamma", "beta"].bytes - before["gamma", "beta"].bytes > 1_000_000
    assert after["beta", "gamma"].bytes - before["beta", "gamma"].bytes < 200_000


@pytest.mark.parametrize("shape", [{"gbps": 0}, {"loss": 1.5}, {"delay_ms": -1}], ids=str)
def test_a_shape_that_cannot_be_is_refused(shape: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="link alpha beta: no such shape"):
        Link(**{"gbps": 1, "delay_ms": 1, **shape}).request("alpha", "beta")


def test_restore_undoes_all_changes(lab: Lab) -> None:
    lab.link("alpha", "beta", gbps=0.01, delay_ms=300)
    lab.cut("alpha", "beta")
    lab.kill_node("beta-1")
    lab.restore()
    received, round_trips_ms = ping(lab, "alpha-1", "beta", "-c3", "-i0.1")
    assert received == 3
    assert min(round_trips_ms) < 300
    assert ping(lab, "beta", "beta-1", "-c1")[0] == 1


def test_a_link_to_nowhere_is_refused(lab: Lab) -> None:
    with pytest.raises(LabError, match="no such link"):
        lab.cut("alpha", "delta")
