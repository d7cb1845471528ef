"""The quickstart over three sites that reach each other in one way only, and with faults on that way.

Compute nodes of different sites cannot reach each other; the links have a rate and a delay. Engines are emulated,
what is between them is not. Whatever happens there, each step must have the samples of an undisturbed run, and each
weight version its digest.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from lab.lab import Lab
from lab.planned.runs import samples_of
from lab.quickstart import SITES, Relay, over_lab, over_relay, over_ssh, relay_at
from tests.runs import Finished, Submitted, submit, submitted

STEPS = 20  # enough of them for KILLS, and for links that are cut and healed
FEW_STEPS = 6
KILLS = 20
PATIENCE_SECONDS = 15
BETA = "beta/actor_generation/0"


@pytest.fixture(scope="module")
def relay(_lab: Lab) -> Iterator[Relay]:
    with relay_at(_lab, "alpha") as relay:
        yield relay


@pytest.fixture(scope="module")
def undisturbed(_lab: Lab, relay: Relay, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """A run over the relay without faults."""
    _lab.restore()
    work = tmp_path_factory.mktemp("undisturbed")
    return submit(over_lab(_lab, work, over_relay(relay, work), steps=STEPS, **emulated()), work)


def assert_same(run: Finished, undisturbed: Finished, steps: int) -> None:
    """The run has all steps and versions, with the batches and the weights of the undisturbed one."""
    assert run.code == 0, run.stderr
    expected = samples_of(undisturbed.directory)
    assert samples_of(run.directory) == {step: of for step, of in expected.items() if step <= steps}
    assert run.digests() == undisturbed.digests()[: steps + 1]
    rows, summary = run.rows(), run.summary()
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    assert all(row["samples"] == 256 and len(row["versions"]) == 1 and not row["dropped_groups"] for row in rows)
    versions = [row["version"] for row in summary["weight_versions"]]
    assert versions == list(range(1, len(versions) + 1))
    assert summary["transport"]["malformed"] == summary["transport"]["refused"] == 0


def emulated(**launch: str) -> dict[str, Any]:
    """Return the sections of an experiment whose engines are emulated."""
    return {"warm_start": None, "rollouts": {"kept": True}, "launch": {"engines": "emulated", **launch}}


def test_over_a_relay(undisturbed: Finished, lab: Lab) -> None:
    assert_same(undisturbed, undisturbed, STEPS)
    assert len({tuple(of) for of in samples_of(undisturbed.directory).values()}) == STEPS
    moved_bytes = undisturbed.summary()["bytes_per_link"]
    for site in ("beta", "gamma"):
        assert lab.bytes_between("alpha", site) > moved_bytes[f"alpha-{site}"] > 1_000_000


def test_through_ssh_tunnels(lab: Lab, undisturbed: Finished, tmp_path: Path) -> None:
    run = submit(over_lab(lab, tmp_path, over_ssh(lab, tmp_path), steps=FEW_STEPS, **emulated()), tmp_path)
    assert_same(run, undisturbed, FEW_STEPS)


def test_gateways_and_the_relay_may_be_killed_at_any_time(
    lab: Lab, relay: Relay, undisturbed: Finished, tmp_path: Path
) -> None:
    chance = random.Random(0)
    config = over_lab(lab, tmp_path, over_relay(relay, tmp_path), steps=STEPS, **emulated())
    with submitted(config, tmp_path) as submission:
        for kill in range(KILLS):
            submission.until("weights_published", kill + 1)
            time.sleep(chance.uniform(0, 0.6))  # about a step
            victim = chance.choice([*SITES, "relay"])
            if victim == "relay":
                relay.kill()
                relay.start()
            else:
                os.kill(gateway_of(submission, victim), signal.SIGKILL)
        run = submission.finish()
    assert_same(run, undisturbed, STEPS)


def gateway_of(submission: Submitted, site: str) -> int:
    """Return the process id of a site's gateway."""
    started = [event for event in submission.events("submitted", "restarted") if event["site"] == site]
    processes = [one for event in started for one in event.get("processes", [event.get("process")])]
    return [one["pid"] for one in processes if one["name"] == "gateway"][-1]


def test_links_may_lose_packets_and_be_cut_for_a_while_and_a_site_that_is_out_is_taken_back(
    lab: Lab, relay: Relay, undisturbed: Finished, tmp_path: Path
) -> None:
    """A short cut is ridden out by all; where it is longer, the others go on."""
    for a, b in combinations(SITES, 2):
        shape = lab.links[frozenset((a, b))]
        lab.link(a, b, shape.gbps, shape.delay_ms, loss=0.005)
    config = over_lab(lab, tmp_path, over_relay(relay, tmp_path), steps=STEPS, **emulated())
    with submitted(config, tmp_path) as submission:

        def until_served(there: bool) -> None:
            """Wait for a version that beta has, or does not have."""
            while (BETA in (served := submission.events("weights_published"))[-1]["to"]) != there:
                submission.until("weights_published", len(served) + 1)

        submission.until("step", 2)
        lab.cut("alpha", "gamma")
        time.sleep(3)
        lab.heal("alpha", "gamma")
        submission.until("step", 4)
        lab.cut("alpha", "beta")
        until_served(False)
        submission.until("step", len(submission.events("step")) + 2)
        lab.heal("alpha", "beta")
        until_served(True)
        run = submission.finish()
    assert submission.events("replica_lost") == []
    assert "alpha-beta" in [event["link"] for event in submission.events("link_out")]
    last = {event["link"]: event["kind"] for event in submission.events("link_out", "link_back")}
    assert set(last.values()) == {"link_back"}
    assert_same(run, undisturbed, STEPS)
    assert lab.stats()["alpha", "gamma"].lost > 0


def test_a_run_goes_on_without_a_site_that_stays_cut_off_and_ends_where_no_other_generates(
    lab: Lab, relay: Relay, undisturbed: Finished, tmp_path: Path
) -> None:
    config = over_lab(lab, tmp_path, over_relay(relay, tmp_path), steps=1000, **emulated(patience="00:00:15"))
    with submitted(config, tmp_path) as submission:
        submission.until("step", 2)
        lab.cut("alpha", "beta")
        submission.until("replica_lost", 1)
        (lost,) = submission.events("replica_lost")
        submission.until("step", len(submission.events("step")) + 2)
        lab.cut("alpha", "gamma")
        run = submission.finish()
    assert lost["member"] == BETA
    assert f"alpha -> beta: no connection for {PATIENCE_SECONDS} s" in lost["cause"]
    assert run.code == 1
    assert "no replica is left to draw samples" in run.stderr
    assert f"no connection for {PATIENCE_SECONDS} s" in run.stderr
    published = [event["digest"] for event in submission.events("weights_published")]
    common = min(len(published), len(undisturbed.digests()))
    assert published[:common] == undisturbed.digests()[:common]
