"""A run with faults in mind, as its user starts and follows it, its processes, and what disturbs these."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import yaml
from _results import ROOT

from hetrl.files import read_lines
from lab.lab import Lab
from lab.launcher import signal_controller
from lab.planned.copies import Copies
from lab.planned.runs import make_weights, samples_of
from lab.shape import RUN_SITES
from lab.submission import CHECKOUT, HETRL, LAUNCHER, SITE_FILES, in_checkout, log_in
from launch.local import alive, stop_processes
from launch.run_directory import Run

PHASE_SECONDS = 180.0
GATEWAY, CONTROLLER = "hetrl.runtime.gateway.gateway_process", "hetrl.runtime.run.controller"
LAUNCH = {"patience": "00:00:10", "hang_timeout": "00:00:30", "orphan_timeout": "00:01:00"}
CHECKPOINTS = {"every_steps": 2}
LAB, TWO_TRAIN = "lab", "lab-training"  # configs of clusters; where two sites train, one may be lost

Following = AbstractContextManager[subprocess.Popen[str]]


class Place:
    """Where a run takes place: groups of processes on this machine. `work` is a directory of its own, with its runs."""

    config = "quickstart"
    sections: Mapping[str, Any] = {"planner": {"solver": "streamrl"}}
    words: Sequence[str] = ()

    def __init__(self, work: Path) -> None:
        work.mkdir(parents=True, exist_ok=True)
        self.work = work

    def write_config(self, changes: Mapping[str, Any], launch: Mapping[str, Any] = {}) -> str:
        """Write an experiment with changes; return its file, as who submits sees it."""
        document = yaml.safe_load((ROOT / "configs" / f"{self.config}.yaml").read_text())
        document |= {
            "checkpoints": CHECKPOINTS,
            "topology": self.topology(document["topology"]),
            **self.sections,
            **changes,
        }
        document["launch"] |= {**LAUNCH, **launch}
        (self.work / "faults.yaml").write_text(yaml.safe_dump(document))
        return "faults.yaml"

    def topology(self, section: Mapping[str, Any]) -> dict[str, Any]:
        """Return the section with the files of this checkout."""
        return {"sites": [str(ROOT / site) for site in section["sites"]], "links": str(ROOT / section["links"])}

    def popen(self, words: Sequence[str], pipes: Mapping[str, Any]) -> subprocess.Popen[str]:
        """Start `hetrl` in the directory, in a session of its own."""
        command = [sys.executable, "-m", "launch.cli", *words]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        return subprocess.Popen(
            command,
            cwd=self.work,
            env=environment,
            text=True,
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            **pipes,
        )

    @contextmanager
    def following(self, *words: str) -> Iterator[subprocess.Popen[str]]:
        """Run a verb that follows a run."""
        process = self.popen([*words, "--yes"], {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE})
        try:
            yield process
        finally:
            kill_session(process)
            process.communicate()

    def submitting(self, changes: Mapping[str, Any], launch: Mapping[str, Any] = {}) -> Following:
        """Submit an experiment with these changes, and follow it."""
        return self.following("submit", self.write_config(changes, launch), *self.words)

    def runs(self) -> list[Run]:
        """Return the first run and those that took it up."""
        return [Run(path) for path in sorted((self.work / "runs").resolve().glob("*"))]

    def rows(self) -> list[dict[str, Any]]:
        """Return the metrics of the steps of the run that goes on."""
        return [row for run in self.runs()[-1:] for row in read_lines(run.metrics)]

    def events(self) -> list[dict[str, Any]]:
        """Return the events of all runs, one run after the other."""
        return [event for run in self.runs() for event in read_lines(run.events)]

    def rewards(self) -> dict[int, float]:
        """Return the reward of each step; of a step that was taken again, its last."""
        return {row["step"]: row["reward"] for run in self.runs() for row in read_lines(run.metrics)}

    def samples(self) -> dict[int, list[tuple[str, str]]]:
        """Return the samples of each step, likewise, where runs keep them."""
        return samples_of(*(run.path for run in self.runs()))

    def processes(self, site: str = "", module: str = "") -> list[psutil.Process]:
        """Return the runs' processes, those at a site, and those that run a module."""
        ids, found = {run.id for run in self.runs()}, []
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                if process.environ().get("HETRL_RUN") not in ids or not alive(process):
                    continue
                if (not site or Path(process.cwd()).name == site) and (not module or module in process.cmdline()):
                    found.append(process)
        return found

    def plans(self) -> list[bytes]:
        """Return the plan of each run."""
        return [(run.path / "plan.json").read_bytes() for run in self.runs()]

    def copied(self) -> bool:
        """Return whether a checkpoint has a copy at another site."""
        return any(event["kind"] == "checkpoint_copied" for event in self.events())

    def lose(self, site: str) -> int:
        """Lose everything of the runs at a site; return how many processes there were."""
        hit = self.processes(site)
        send(hit, signal.SIGKILL)
        for run in self.runs():
            shutil.rmtree(run.site(site))
        return len(hit)

    def leave_nothing(self) -> None:
        """End what is left of the runs."""
        for run in self.runs():
            stop_processes(run, ())


class Clusters(Place):
    """Three real Slurm clusters of a lab that is logged in, discovered and probed; its user has the plan of `config`.

    A site is lost with its nodes and the daemon of its Slurm, until `leave_nothing`.
    """

    sections: Mapping[str, Any] = {}

    def __init__(self, lab: Lab, name: str, config: str) -> None:
        super().__init__(lab.home(LAUNCHER) / name)
        self._lab, self._name, self._lost = lab, name, set[str]()
        self.config, self.words = config, ("--plan", f"../{config}.json")
        for shared in ("topology", CHECKOUT):  # site files name what was found relative to where `hetrl` runs
            (self.work / shared).symlink_to(f"../{shared}")
        self._own(self.work)

    def write_config(self, changes: Mapping[str, Any], launch: Mapping[str, Any] = {}) -> str:
        file = super().write_config(changes, launch)
        self._own(self.work / file)
        return file

    def topology(self, section: Mapping[str, Any]) -> dict[str, Any]:
        return in_checkout(section)

    def popen(self, words: Sequence[str], pipes: Mapping[str, Any]) -> subprocess.Popen[str]:
        inside = f'cd {self._name} && exec "$@"'
        return self._lab.popen(LAUNCHER, ["sh", "-c", inside, "sh", f"../{HETRL}", *words], **pipes)

    def lose(self, site: str) -> int:
        hit = self.processes(site)
        self._lost.add(site)
        signal_controller(self._lab, site, signal.SIGKILL)
        for node in range(self._lab.sites[site].nodes):
            self._lab.kill_node(f"{site}-{node + 1}")
        for run in self.runs():
            shutil.rmtree(self._lab.home(site) / "scratch/hetrl" / run.id)
        return len(hit)

    def leave_nothing(self) -> None:
        for site in self._lost:
            self._lab.run(site, ["slurmctld"], user="root")
        if self._lost:
            self._lab.restore()
        for site in self._lab.sites:
            self._lab.run(site, ["sh", "-c", "scancel --user=$USER"], check=False)

    def _own(self, path: Path) -> None:
        status = self.work.parent.stat()
        os.chown(path, status.st_uid, status.st_gid)


def sometimes_right(work: Path) -> dict[str, Any]:
    """Train a start whose samples are sometimes right, unless it is there; return what makes an experiment begin so."""
    trained = work / "start" / "weights"
    if not trained.exists():
        with Copies() as copies:
            make_weights(copies, work / "start")
    weights = str(trained)
    return {"model": {"architecture": weights, "weights": weights, "dtype": "fp32"}, "warm_start": None}


@contextmanager
def three_clusters() -> Iterator[Lab]:
    """Start the clusters of configs/lab.yaml and lab-training.yaml, ready for runs of their plans."""
    with Lab(RUN_SITES, slurm=True) as lab:
        log_in(lab)
        config = f"{CHECKOUT}/configs/lab.yaml"
        quick = ("--seconds", "1", "--streams", "1", "--round-trips", "5")
        plans = [["plan", f"{CHECKOUT}/configs/{name}.yaml", "--output", f"{name}.json"] for name in (LAB, TWO_TRAIN)]
        for words in (["discover", *SITE_FILES], ["probe", config, *quick], *plans):
            lab.run(LAUNCHER, [HETRL, *words], timeout_seconds=PHASE_SECONDS)
        yield lab


def kill_session(process: subprocess.Popen[str]) -> None:
    """Kill a launcher with what it started itself."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def to_the_end(launcher: subprocess.Popen[str], seconds: float, what: str = "the run") -> None:
    """Wait for the end of a run; raises RuntimeError where it fails, TimeoutExpired where it does not end."""
    _, said = launcher.communicate(timeout=seconds)
    if launcher.returncode:
        raise RuntimeError(f"{what} ended with code {launcher.returncode}: {said[-2000:]}")


def site_and_module(process: psutil.Process) -> tuple[str, str]:
    """Return where a process of a run is, and which module or program runs; raises psutil.Error of one that ended."""
    words = process.cmdline()
    return Path(process.cwd()).name, words[words.index("-m") + 1] if "-m" in words else Path(words[0]).name


def until(condition: Callable[[], object], process: subprocess.Popen[str]) -> None:
    """Wait for a moment of a run; raises TimeoutError where it does not come."""
    deadline = time.monotonic() + PHASE_SECONDS
    while not condition():
        if time.monotonic() > deadline or process.poll() is not None:
            raise TimeoutError("the phase did not come")
        time.sleep(0.01)


def send(processes: Sequence[psutil.Process], number: signal.Signals) -> None:
    """Send all of them a signal."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def stand_still(processes: Sequence[psutil.Process], seconds: float) -> None:
    """Let processes do nothing for a while: those of a gateway as if all links of its site were out."""
    send(processes, signal.SIGSTOP)
    time.sleep(seconds)
    send(processes, signal.SIGCONT)
