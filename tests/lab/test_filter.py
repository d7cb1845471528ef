"""The packet filter of the lab, with real connections."""

from __future__ import annotations

import pytest

from lab.available import skip_unless_available
from lab.lab import Lab
from lab.probes import reaches
from lab.shape import JOB_USER_ID, Site

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(300)]

# A SYN that is dropped shows by nothing but silence.
SILENCE_SECONDS = 1.5


@pytest.mark.parametrize(
    ("sender", "receiver", "port"),
    [
        ("alpha-1", "alpha-2", 8000),
        ("alpha-1", "alpha", 8000),
        ("alpha", "alpha-1", 8000),
        ("alpha-1", "beta", 7000),
        ("alpha-1", "beta", 7099),
        ("alpha", "beta", 7000),
    ],
)
def test_the_filter_lets_pass(lab: Lab, sender: str, receiver: str, port: int) -> None:
    assert reaches(lab, sender, receiver, port, seconds=20)


@pytest.mark.parametrize(
    ("sender", "receiver", "port"),
    [
        ("alpha-1", "beta-1", 7000),
        ("alpha", "beta-1", 7000),
        ("alpha-1", "beta", 7100),
        ("alpha", "beta", 6817),
        ("gamma", "alpha-2", 7000),
    ],
)
def test_the_filter_stops(lab: Lab, sender: str, receiver: str, port: int) -> None:
    assert not reaches(lab, sender, receiver, port, SILENCE_SECONDS)


def test_ssh_reaches_every_head_from_heads_and_nodes(lab: Lab) -> None:
    for sender in ("alpha-1", "beta", "gamma-1"):
        for head in lab.sites:
            done = lab.run(sender, ["ssh", "-o", "BatchMode=yes", head, "id --user; hostname"])
            assert done.stdout.split() == [str(JOB_USER_ID), head]


def test_an_open_lab_has_no_filter() -> None:
    skip_unless_available()
    with Lab({"alpha": Site(1), "beta": Site(1)}, open=True) as lab:
        assert reaches(lab, "alpha-1", "beta-1", 8000, seconds=20)
