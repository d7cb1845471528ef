"""Three clusters of `fake_slurm`, and a run over them: training at alpha, a rollout each at beta and gamma."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from hetrl.files import EventLog, append_line, read_lines
from lab.quick import submit_slurm
from launch.run_directory import Run
from tests.launch.launch_cases import plain_console
from tests.launch.slurm import fake_slurm

SITES = ("alpha", "beta", "gamma")
PROGRAMS = ("sbatch", "squeue", "scancel", "scontrol", "srun", "ssh")
PROGRAM = f"""#!{sys.executable} -ES
import sys
sys.path.insert(0, {str(Path(fake_slurm.__file__).parent)!r})
from fake_slurm import main
sys.exit(main())
"""


@dataclass(frozen=True)
class Clusters:
    """The clusters' directories, and the experiment that names them."""

    path: Path

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    def fault(self, site: str, program: str, kinds: str = "") -> None:
        """Make a program of a site misbehave from here on, or no more."""
        (self.path / site / "faults" / program).write_text(kinds)

    def cut(self, site: str, dead: bool = True) -> None:
        """Let a site's login node not answer, or again."""
        (self.path / site / "dead").touch() if dead else (self.path / site / "dead").unlink()

    def jobs(self, site: str) -> list[dict[str, str]]:
        with fake_slurm.Queue(self.path / site) as jobs:
            return [*jobs]

    def states(self) -> dict[str, list[str]]:
        """Return the states of all jobs by site."""
        return {site: [job["state"] for job in self.jobs(site)] for site in SITES}

    def turn(self, site: str, state: str, **more: str) -> None:
        """Let every job of a site be in a state."""
        with fake_slurm.Queue(self.path / site) as jobs:
            for job in jobs:
                job.update({"state": state, "reason": "None", **more})

    def calls(self, site: str, program: str) -> list[str]:
        path = self.path / site / "calls"
        lines = path.read_text().splitlines() if path.exists() else []
        return [line for line in lines if line.startswith(f"{program} ")]

    def submissions(self, site: str) -> int:
        """Return how often sbatch was asked for a job."""
        return sum("--test-only" not in call for call in self.calls(site, "sbatch"))

    def directory(self, run: Run, site: str) -> Path:
        """Return a run's directory at a cluster."""
        return self.path / site / "scratch" / "hetrl" / run.id / site

    def runs(self) -> list[Run]:
        return [Run(path) for path in sorted((self.path / "runs").glob("*"))]

    def control(self, run: Run, *kinds: str, **fields: object) -> None:
        """Let the controller at the lead site write events."""
        events = EventLog(self.directory(run, "alpha") / "events.jsonl", "alpha")
        for kind in kinds:
            events.append(kind, **fields)

    def finish(self, run: Run) -> None:
        """Let the controller go through two steps to the end, and the jobs end."""
        there = self.directory(run, "alpha")
        seconds = {"generation_wait": 1.2, "iteration": 3.1}
        self.control(run, "go", members=["alpha/actor_training/0"])
        for step in (1, 2):
            append_line(there / "metrics.jsonl", {"step": step, "reward": 0.5})
            self.control(run, "step", step=step, of=2, reward=0.5, seconds=seconds)
        (there / "logs" / "controller.log").write_text("all is well\n")
        self.control(run, "finished")
        for site in SITES:
            self.turn(site, "COMPLETED")


def make_clusters(path: Path) -> Clusters:
    """Write the programs, a directory per cluster, and the files of the experiment."""
    (path / "bin").mkdir(parents=True)
    for program in PROGRAMS:
        script = path / "bin" / program
        script.write_text(PROGRAM)
        script.chmod(0o755)
    for site in SITES:
        (path / site / "faults").mkdir(parents=True)
        (path / site / ".bash_profile").write_text(f"export PATH={path}/bin:$PATH\n")
        more = {"allocation": "gpu"} if site == "beta" else {}  # so that its replica is an array
        entry = {"name": f"{site}-0", "gpu": "cpu", "gpus": 4}
        keys = {"ssh": site, "scratch": str(path / site / "scratch"), "python": sys.executable, "gres": GRES}
        (path / f"{site}.yaml").write_text(yaml.safe_dump({"name": site, **keys, "nodes": [entry], **more}))
    config = {
        "name": "quick",
        "model": {"architecture": "qwen3-0.6b"},
        "data": {"kind": "larger-digit"},
        "batch": {"samples": 16, "prompt_tokens": 4, "response_tokens": 4},
        "steps": 2,
        "topology": {"sites": [f"{site}.yaml" for site in SITES]},
        "launch": {"executor": "slurm", "walltime": "01:00:00", "poll_seconds": 1},
    }
    (path / "config.yaml").write_text(yaml.safe_dump(config))
    return Clusters(path)


GRES: Mapping[str, str] = {"a100": "cpu", "l4": "cpu"}


@contextmanager
def environment(clusters: Clusters) -> Iterator[Clusters]:
    """Let this process find the programs of clusters, and give these."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", str(clusters.path / "bin"), prepend=":")
        patch.setenv("FAKE_CLUSTERS", str(clusters.path))
        patch.setenv("XDG_RUNTIME_DIR", str(clusters.path))
        patch.setenv("HETRL_RUNS", str(clusters.path / "runs"))
        patch.chdir(clusters.path)
        yield clusters


def submit(clusters: Clusters, detach: bool = True) -> int:
    """Submit the run from this process; returns the exit code, raises what `hetrl submit` prints as an error."""
    return submit_slurm(clusters.config, plain_console(), detach)


def drive(path: str) -> None:
    """Be a launcher that the clusters' programs may kill."""
    clusters = Clusters(Path(path))
    (clusters.path / "launcher").write_text(str(os.getpid()))
    with environment(clusters):
        sys.exit(submit(clusters))


def kinds(run: Run) -> list[str]:
    return [row["kind"] for row in read_lines(run.events)]
