"""Measuring on real clusters: `hetrl discover`, `probe`, and a plan of what was measured; islands of MPI and of srun.

The clusters share nothing but ssh. Alpha has two nodes, and MPI between them.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from hetrl.describe.measured_files import read_file
from hetrl.describe.measured_links import MeasuredLinks
from lab.available import skip_unless_available
from lab.lab import ROOT, Lab
from lab.launcher import queued, until_nothing_is_queued
from lab.processes import only_child_of, wait_until
from lab.shape import JOB_USER, Link, Site

SITES = {"alpha": Site(2, "a100", 2), "beta": Site(1, "l40s", 1)}
LINK = Link(gbps=0.1, delay_ms=20)
COMMAND_SECONDS = 280
PROBE = ("--seconds", "2", "--streams", "1", "--streams", "4", "--round-trips", "10", "--wait", "120")


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    skip_unless_available()
    with Lab(SITES, {("alpha", "beta"): LINK}, slurm=True) as lab:
        describe(lab)
        hidden = ["scontrol", "update", "PartitionName=gpu"]
        lab.run("beta", [*hidden, "Hidden=YES"], user="root")  # a site's file may name a partition that is
        found = hetrl(lab, "discover", "alpha.yaml", "beta.yaml")
        lab.run("beta", [*hidden, "Hidden=NO"], user="root")
        assert found.returncode == 0, found.stderr
        yield lab


def hetrl(lab: Lab, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command line on the head of alpha."""
    return lab.run("alpha", ["venv/bin/hetrl", *arguments], timeout_seconds=COMMAND_SECONDS, check=False)


def describe(lab: Lab, *measured: str) -> Path:
    """Write an experiment over both sites into the home of alpha; the links file says nothing of what is there."""
    home = lab.home("alpha")
    site_file = yaml.safe_load((ROOT / "topology" / "sites" / "lab-alpha.yaml").read_text())
    for site, shape in SITES.items():
        ssh, mpi = ("local", "pmi2") if site == "alpha" else (site, "none")
        own = {"name": site, "ssh": ssh, "mpi": mpi, "gres": {shape.gpu: "cpu"}, "engines": ["megatron", "vllm"]}
        place = {"login": f"{JOB_USER}@{site}", "inventory": f"topology/measured/{site}.json"}
        (home / f"{site}.yaml").write_text(yaml.safe_dump({**site_file, **own, **place}))
    (home / "links.yaml").write_text(
        yaml.safe_dump({"links": [{"between": ["alpha", "beta"], "delay_ms": 1, "gbps": 9}]})
    )
    document = yaml.safe_load((ROOT / "configs" / "lab.yaml").read_text())
    topology = {"sites": [f"{site}.yaml" for site in SITES], "links": "links.yaml", "measured": list(measured)}
    (home / "try.yaml").write_text(yaml.safe_dump({**document, "topology": topology}))
    return home


def measured_links(home: Path) -> MeasuredLinks:
    (path,) = (home / "topology" / "measured").glob("links-*.json")
    found = read_file(path)
    assert isinstance(found, MeasuredLinks)
    return found


def test_a_plan_rests_on_what_was_discovered_and_probed(lab: Lab) -> None:
    home = describe(lab, "topology/measured")
    probed = hetrl(lab, "probe", "try.yaml", *PROBE)
    assert probed.returncode == 0, probed.stdout + probed.stderr
    measured = measured_links(home)
    assert [(one.source, one.target, one.way) for one in measured.links] == [
        ("alpha", "beta", "ssh"),
        ("beta", "alpha", "ssh"),
    ]
    for one in measured.links:
        assert len(one.round_trip_ms) == 20
        assert one.delay_ms > 0.9 * LINK.delay_ms
        assert [each.streams for each in one.throughput] == [1, 4]
        assert 0.02 < one.best.gbps < 1.1 * LINK.gbps
    assert [(one.source, one.way) for one in measured.nodes] == [("alpha", "mpi")]
    assert not list((home / "scratch").glob("hetrl/*"))
    until_nothing_is_queued(lab)

    planned = hetrl(lab, "plan", "try.yaml", "--solver", "verl", "--json")
    assert planned.returncode == 0, planned.stderr
    inputs = planning_inputs(lab)
    assert json.loads(planned.stdout)["inputs"]["topology"] == inputs["topology"]
    assert inputs["delay_ms"] == pytest.approx(max(one.delay_ms for one in measured.links))
    assert inputs["gbps"] == pytest.approx(min(one.best.gbps for one in measured.links))


def planning_inputs(lab: Lab) -> dict[str, Any]:
    """Return the link that the planner reads in the experiment, and the digest of the topology."""
    say = (
        "import json; from dataclasses import asdict; from pathlib import Path; from hetrl.problem import read_problem;"
        "problem = read_problem(Path('try.yaml')); (link,) = problem.topology.links;"
        "print(json.dumps({**problem.digests, **asdict(link)}))"
    )
    return dict(json.loads(lab.run("alpha", ["venv/bin/python", "-c", say], environment=CODE).stdout))


CODE: Mapping[str, str] = {"PYTHONPATH": str(ROOT)}
ISLAND = """
import os, sys
from pathlib import Path
from hetrl.runtime.instruments.island import island_from_environment, started_by_mpi
island = island_from_environment(os.environ, Path.cwd(), sys.argv[1] if len(sys.argv) > 1 else None)
print(started_by_mpi(os.environ), island.rank, island.size, island.local_rank, island.host, island.port)
"""


@pytest.mark.parametrize("mpi", ["pmi2", "none"])
def test_an_island_knows_its_ranks_and_where_the_first_serves(lab: Lab, mpi: str) -> None:
    step = ["srun", f"--mpi={mpi}", "--nodes=2", "--ntasks-per-node=2", "--mem-per-cpu=1000"]
    done = lab.run("alpha", [*step, sys.executable, "-c", ISLAND], environment=CODE, timeout_seconds=COMMAND_SECONDS)
    ranks = sorted(line.split() for line in done.stdout.splitlines())
    assert [rank[:4] for rank in ranks] == [[str(mpi == "pmi2"), str(rank), "4", str(rank % 2)] for rank in range(4)]
    ((host, port),) = {(rank[4], rank[5]) for rank in ranks}
    assert host == lab.address("alpha-1") and int(port) > 0


def drain(lab: Lab, state: str) -> None:
    """Take the node of beta out of service, or back (`resume`)."""
    order = ["scontrol", "update", "nodename=beta-1", f"state={state}", "reason=test"]
    lab.run("beta", order, user="root")


def test_a_site_whose_job_does_not_start_is_named_and_the_rest_is_written(lab: Lab) -> None:
    home = describe(lab)
    for path in (home / "topology" / "measured").glob("links-*.json"):
        path.unlink()
    drain(lab, "drain")
    probed = hetrl(lab, "probe", "try.yaml", *PROBE[:-1], "60")  # enough for alpha on a busy machine
    drain(lab, "resume")
    assert probed.returncode == 5, probed.stderr
    assert "beta: its task did not start within 60 s" in probed.stderr
    measured = measured_links(home)
    assert not measured.links and [one.source for one in measured.nodes] == ["alpha"]
    assert [one.what for one in measured.skipped] == ["beta"]
    until_nothing_is_queued(lab)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupt_cancels_what_is_queued(lab: Lab, number: int, code: int) -> None:
    home = describe(lab)
    drain(lab, "drain")
    with lab.popen("alpha", ["venv/bin/hetrl", "probe", "try.yaml", *PROBE], stderr=subprocess.PIPE) as probing:
        wait_until(lambda: "PD" in lab.run("beta", ["squeue", "--noheader"]).stdout, 120, lambda: queued(lab))
        os.kill(only_child_of(probing.pid), number)
        _, said = probing.communicate(timeout=COMMAND_SECONDS)
    drain(lab, "resume")
    assert probing.returncode == code, said
    until_nothing_is_queued(lab)
    assert not list((home / "scratch").glob("hetrl/*"))
