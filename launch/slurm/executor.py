"""The Slurm executor: every site is a cluster. Its jobs go on without this process.

start()                                  submit what is not submitted yet
thread of a site, every poll_seconds:    one command: its jobs, and the new bytes of its files
                                         files into the copies here; endpoints on to the sites that wait for them
poll(), whenever the follower likes:     looks that came in -> events, and the jobs that ended
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

from hetrl.files import EventLog, read_lines
from launch.executor import Exit, Started
from launch.run_directory import LAUNCHER, Run
from launch.show import job_standing
from launch.slurm.jobs import Jobs, jobs_of
from launch.slurm.poll import Look
from launch.slurm.run import SlurmRun, SlurmSite
from launch.slurm.submit import submit_everywhere
from launch.slurm.watch import cancel_everywhere, carry, living_jobs, look_at, refresh
from launch.state import State

# Slurm gives the processes of a cancelled job KillWait (30 s by default), and tidies the node up then (COMPLETING).
ENDING_SECONDS = 60.0
ENDING_POLL_SECONDS = 2.0


class SlurmExecutor:
    """Submits, watches and stops the jobs of one run; `state` returns what its events say by then."""

    outlives = True

    def __init__(self, run: Run, slurm: SlurmRun, events: EventLog, state: Callable[[], State]) -> None:
        """Look at nothing yet."""
        self.lag_seconds, self.begins_without = slurm.poll_seconds, slurm.begins_without_spare
        self._run, self._slurm, self._events, self._state = run, slurm, events, state
        self.adopts = bool(state().jobs)
        self._jobs: Jobs | None = None
        self._submitted = False
        self._looks: queue.SimpleQueue[tuple[SlurmSite, Look]] = queue.SimpleQueue()
        self._over = threading.Event()
        self._threads: list[threading.Thread] = []

    @property
    def elsewhere(self) -> str:
        """Return where the run's checkpoints are; nothing while it has none."""
        if not any(event["kind"] == "checkpoint" for event in read_lines(self._run.events)):
            return ""
        return f"checkpoints of the run are at {self._slurm.lead.name}: {self._slurm.lead.directory}/checkpoints"

    def start(self, interrupted: Callable[[], int | None]) -> None:
        """Submit the jobs that are not submitted yet; a run that could not be submitted everywhere is nowhere."""
        submit_everywhere(self._run, self._slurm, self._events, self._state(), interrupted)
        self._submitted = True

    def poll(self) -> list[Exit]:
        """Return the jobs whose end was seen since the last call.

        Raises GangTimeoutError where some have waited with their nodes for others for too long.
        """
        if self._over.is_set():
            return []
        if self._jobs is None:
            self._jobs = jobs_of(self._slurm, self._events, self._state())
            # A site that hangs keeps neither the others waiting nor, as they are daemons, this process from its end.
            self._threads = [
                threading.Thread(target=self._watch, args=(site,), daemon=True) for site in self._slurm.sites
            ]
            for thread in self._threads:
                thread.start()
        if self._state().phase == "starting":  # before the looks: what came with the last ones has been collected
            self._jobs.check_start(self._slurm.queue_timeout_seconds)
        for site, said in self._state().silent.items():  # as another process found it: here it may answer
            self._jobs.silent.setdefault(site, said)
        exits: list[Exit] = []
        while not self._looks.empty():
            exits += self._jobs.note(*self._looks.get())
        return exits

    def alive(self) -> list[Started]:
        """Return the jobs that have not ended as far as is known."""
        return self._jobs.alive() if self._jobs is not None else []

    def leave(self) -> None:
        """Look no more; the jobs go on."""
        self._over.set()

    def stop(self) -> list[str]:
        """Cancel every job at every site, look until they have ended, and return a line for what may live on.

        What could not be submitted is withdrawn already.
        """
        self.leave()
        if not self._submitted:
            return []
        _, remains = cancel_everywhere(self._slurm)
        deadline = time.monotonic() + ENDING_SECONDS
        while True:
            state = refresh(self._run, self._slurm, LAUNCHER, logs=True)
            ending = [job for job in living_jobs(state) if job["site"] not in state.silent]
            if not ending or time.monotonic() > deadline:
                return [*remains, *(f"{job['site']}: {job['name']} is {job_standing(job)}" for job in ending)]
            time.sleep(ENDING_POLL_SECONDS)

    def _watch(self, site: SlurmSite) -> None:
        carried: dict[str, str] = {}
        while not self._over.is_set():
            try:
                self._looks.put((site, look_at(self._run, site)))
                carry(self._run, self._slurm, site, carried)
            except Exception as error:  # as of a disk: it is said, and tried again
                self._looks.put((site, Look(None, (), f"{type(error).__name__}: {error}")))
            self._over.wait(self._slurm.poll_seconds)
