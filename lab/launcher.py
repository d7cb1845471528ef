"""`hetrl` as a process on the head of alpha, with an experiment over three clusters; and ways to disturb these."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import yaml

from lab.lab import ROOT, Lab
from lab.processes import wait_until
from lab.quick import ARRAY, GANG
from lab.shape import JOB_USER, JOB_USER_ID

SITES = ("alpha", "beta", "gamma")
GRES = {"alpha": "a100", "beta": "l40s", "gamma": "l4"}
COUNTS = {"alpha": 1, "beta": 2, "gamma": 1}  # jobs of the run
ALL_RUN = {site: ["RUNNING"] * count for site, count in COUNTS.items()}
NOTHING: dict[str, list[str]] = {site: [] for site in SITES}
WORK = "work"
SUBMIT = "from lab.quick import submit_here; submit_here()"
# Generous: where other work keeps this machine busy, a launcher takes half a minute to start.
PATIENCE_SECONDS = 240.0
EMPTY_SECONDS = 60.0  # a job that has ended is completing for some seconds


class Launcher:
    """An experiment in the job user's home at alpha, and `hetrl` on that head.

    `keys` are more keys of each site's file, `launch` more of the experiment's section. `shared` is a directory that
    all machines see, for the files of the runs at all sites.
    """

    def __init__(
        self,
        lab: Lab,
        name: str,
        launch: Mapping[str, object] = {},
        keys: Mapping[str, Mapping[str, object]] = {},
        shared: Path | None = None,
    ) -> None:
        self.lab, self.name, self._shared = lab, name, shared
        self.home = lab.home("alpha") / WORK / name
        (self.home / "templates").mkdir(parents=True)
        (self.home / "templates/gang.sbatch.j2").write_text(GANG)
        (self.home / "templates/array.sbatch.j2").write_text(ARRAY)
        for site in SITES:
            scratch = {"scratch": str(shared)} if shared else {}
            file = {**site_file(site, name), **scratch, **keys.get(site, {})}
            (self.home / f"{site}.yaml").write_text(yaml.safe_dump(file))
        settings = {"executor": "slurm", "walltime": "00:20:00", "poll_seconds": 1, "templates": "templates"}
        config = {
            "name": "quick",
            "model": {"architecture": "qwen3-0.6b"},
            "data": {"kind": "larger-digit"},
            "batch": {"samples": 16, "prompt_tokens": 4, "response_tokens": 4},
            "steps": 2,
            "topology": {"sites": [f"{site}.yaml" for site in SITES]},
            "launch": {**settings, **launch},
        }
        (self.home / "config.yaml").write_text(yaml.safe_dump(config))
        for path in (self.home.parent, self.home, *self.home.rglob("*")):
            os.chown(path, JOB_USER_ID, JOB_USER_ID)

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Start `hetrl VERB ...`, or the submission of the quick plan without arguments."""
        return self.python(*(["-m", "launch.cli", *arguments] if arguments else ["-c", SUBMIT]))

    def python(self, *words: str) -> subprocess.Popen[str]:
        """Start a Python program beside the experiment."""
        inside = f'cd {WORK}/{self.name} && exec "$@"'
        command = ["sh", "-c", inside, "sh", sys.executable, *words]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return self.lab.popen("alpha", command, environment={"PYTHONPATH": str(ROOT)}, **pipes)

    def hetrl(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run it to its end."""
        process = self.start(*arguments)
        stdout, stderr = process.communicate(timeout=PATIENCE_SECONDS)
        return subprocess.CompletedProcess(arguments, process.returncode, stdout, stderr)

    @property
    def run(self) -> Path:
        """Return the directory of the run."""
        (found,) = (self.home / "runs").iterdir()
        return found

    def state(self) -> dict[str, object]:
        return json.loads((self.run / "state.json").read_text())

    def kinds(self) -> list[str]:
        found = sorted((self.home / "runs").glob("*/events.jsonl"))
        return [json.loads(line)["kind"] for path in found for line in path.read_text().splitlines()]

    def until(self, follower: subprocess.Popen[str], kind: str) -> None:
        """Wait for an event of a run that a launcher follows."""
        self.wait(follower, lambda: kind in self.kinds(), kind)

    def wait(self, follower: subprocess.Popen[str], condition: Callable[[], bool], what: str) -> None:
        """Wait for a condition; fails with what the launcher said where it ends before."""

        def holds() -> bool:
            over = follower.poll() is not None
            held = condition()
            assert held or not over, "".join(follower.communicate())
            return held

        wait_until(holds, PATIENCE_SECONDS, lambda: f"not there: {what}")

    def directory(self, site: str) -> Path:
        """Return the run's directory at a cluster."""
        scratch = self._shared or self.lab.home(site) / WORK / self.name / "scratch"
        return scratch / "hetrl" / self.run.name / site

    def tell(self, site: str, file: str) -> None:
        """Let the jobs of a site end, or fail."""
        (self.directory(site) / file).touch()

    def end(self, follower: subprocess.Popen[str]) -> None:
        """Let all jobs end, and the launcher that follows them with code 0."""
        for site in SITES:
            self.tell(site, "end")
        stdout, stderr = follower.communicate(timeout=PATIENCE_SECONDS)
        assert follower.returncode == 0, stdout + stderr


def site_file(site: str, name: str) -> dict[str, object]:
    return {
        "name": site,
        "ssh": "local" if site == "alpha" else site,
        "scratch": f"/home/{JOB_USER}/{WORK}/{name}/scratch",
        "python": sys.executable,
        "gres": {GRES[site]: "cpu"},
        "nodes": [{"name": f"{site}-0", "gpu": "cpu", "gpus": 4, "host_memory_gb": 8}],
        "allocation": "gpu" if site == "beta" else "node",  # so that its replica is an array
        "gpu_request": "gpus-per-node" if site == "gamma" else "gres",
    }


def kill(process: subprocess.Popen[str]) -> None:
    """End a launcher as a power failure would."""
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


# --- what the clusters have -------------------------------------------------------------------------------------------


def jobs(lab: Lab, site: str) -> list[str]:
    """Return what squeue says of the jobs that wait or run, a state each, in alphabetical order."""
    return sorted(_squeue(lab, site, "--format=%T").split())


def _squeue(lab: Lab, site: str, *options: str) -> str:
    return lab.run(site, ["squeue", "--local", "--noheader", f"--user={JOB_USER}", *options]).stdout


def queued(lab: Lab, *sites: str) -> str:
    """Return the lines of squeue at these sites, without any at all sites of the lab."""
    return "".join(_squeue(lab, site) for site in sites or lab.sites)


def until_nothing_is_queued(lab: Lab, *sites: str, timeout_seconds: float = EMPTY_SECONDS) -> None:
    """Wait until these sites, or all, have no jobs any more; fails with those that they have."""
    wait_until(lambda: not queued(lab, *sites), timeout_seconds, lambda: queued(lab))


def everywhere(lab: Lab) -> dict[str, list[str]]:
    return {site: jobs(lab, site) for site in SITES}


def until_jobs(lab: Lab, expected: Mapping[str, list[str]]) -> None:
    wait_until(lambda: everywhere(lab) == expected, PATIENCE_SECONDS, lambda: f"not the jobs {expected}")


# --- what goes wrong --------------------------------------------------------------------------------------------------


def signal_controller(lab: Lab, site: str, number: signal.Signals) -> None:
    lab.run(site, ["sh", "-c", f"kill -{int(number)} $(cat /run/slurmctld.pid)"], user="root")


@contextmanager
def hung(lab: Lab, site: str) -> Iterator[None]:
    """Let the controller of a site accept connections, and answer nothing."""
    signal_controller(lab, site, signal.SIGSTOP)
    try:
        yield
    finally:
        signal_controller(lab, site, signal.SIGCONT)
        _until_usable(lab, site)


@contextmanager
def down(lab: Lab, site: str) -> Iterator[None]:
    """Let a site have no controller."""
    signal_controller(lab, site, signal.SIGTERM)
    try:
        yield
    finally:
        lab.run(site, ["slurmctld"], user="root")
        _until_usable(lab, site)


@contextmanager
def cut(lab: Lab, site: str) -> Iterator[None]:
    """Let nothing pass between alpha and a site, in silence."""
    lab.cut("alpha", site)
    try:
        yield
    finally:
        lab.heal("alpha", site)


def _until_usable(lab: Lab, site: str) -> None:
    nodes, usable = ["sinfo", "--local", "--noheader", "--partition=gpu", "--format=%T"], {"idle", "mixed", "allocated"}

    def all_usable() -> bool:
        found = set(lab.run(site, nodes, check=False).stdout.split())
        return bool(found) and found <= usable

    wait_until(all_usable, PATIENCE_SECONDS, lambda: f"no usable nodes at {site}")


class Held:
    """A program of a site's login shells that waits before it starts, until `release`.

    sbatch --test-only, which only asks, is let through.
    """

    SCRIPT = """\
#!/bin/bash
case " $* " in *" --test-only "*) exec {program} "$@" ;; esac
echo "$@" >>{work}/waits
while [ -e {work}/gate ]; do sleep 0.1; done
{program} "$@"
code=$?
touch {work}/done
exit "$code"
"""

    def __init__(self, lab: Lab, site: str, program: str) -> None:
        self._work, home = lab.home(site) / "held", f"/home/{JOB_USER}"
        (self._work / "bin").mkdir(parents=True)
        (self._work / "gate").touch()
        wrapper = self._work / "bin" / program
        wrapper.write_text(self.SCRIPT.format(program=f"/usr/bin/{program}", work=f"{home}/held"))
        wrapper.chmod(0o755)
        for path in (self._work, *self._work.rglob("*")):
            os.chown(path, JOB_USER_ID, JOB_USER_ID)
        (lab.home(site) / ".bash_profile").write_text(f"PATH={home}/held/bin:$PATH\n")

    @property
    def waits(self) -> bool:
        """Return whether it has been called."""
        return (self._work / "waits").exists()

    @property
    def calls(self) -> int:
        """Return how often it has been called."""
        return len((self._work / "waits").read_text().splitlines()) if self.waits else 0

    @property
    def done(self) -> bool:
        """Return whether it has been called and has ended."""
        return (self._work / "done").exists()

    def release(self) -> None:
        (self._work / "gate").unlink()
