"""Watch a run at its Slurm sites: a thread per site looks every so often, and copies home what was written.

thread of a site, every poll_seconds:    one command: its jobs, and the new bytes of its files
                                         files into the copies here; endpoints on to the sites that wait for them
poll(), whenever the follower likes:     looks that came in -> events, and the jobs that ended
"""

from __future__ import annotations

import queue
import shlex
import threading
from collections.abc import Callable
from pathlib import PurePosixPath

from hetrl.errors import HetrlError
from hetrl.events import EventLog
from launch.executor import Exit
from launch.run_directory import Run
from launch.slurm.commands import cancel_script, parse_cancelled
from launch.slurm.discover import at_every_site
from launch.slurm.files import Mirror
from launch.slurm.jobs import Jobs, jobs_of
from launch.slurm.poll import Look, parse_poll, poll_script
from launch.slurm.run import SlurmRun, SlurmSite
from launch.state import State

LOOK_SECONDS = 60.0
CANCEL_SECONDS = 120.0
CARRY_SECONDS = 30.0


class SlurmExecutor:
    """Watches and stops the jobs of one run; `state` returns what its events say by then."""

    def __init__(self, run: Run, slurm: SlurmRun, events: EventLog, state: Callable[[], State]) -> None:
        """Look at nothing yet."""
        self.lag_seconds = slurm.poll_seconds
        self._run, self._slurm, self._state = run, slurm, state
        self._jobs: Jobs = jobs_of(slurm, events, state())
        self._looks: queue.SimpleQueue[tuple[SlurmSite, Look]] = queue.SimpleQueue()
        self._over = threading.Event()
        self._threads: list[threading.Thread] = []

    def poll(self) -> list[Exit]:
        """Return the jobs whose end was seen since the last call.

        Raises GangTimeoutError where some have waited with their nodes for others for too long.
        """
        if not self._threads:
            self._threads = [
                threading.Thread(target=self._watch, args=(site,), daemon=True) for site in self._slurm.sites
            ]
            for thread in self._threads:
                thread.start()
        if self._state().phase == "starting":  # before the looks: what came with the last ones has been collected
            self._jobs.check_start(self._slurm.gang_timeout_seconds)
        exits: list[Exit] = []
        while not self._looks.empty():
            exits += self._jobs.note(*self._looks.get())
        return exits

    def names(self) -> list[str]:
        """Return `site/job` of what has not ended as far as is known."""
        return self._jobs.alive()

    def leave(self) -> None:
        """Look no more; the jobs go on."""
        self._over.set()

    def stop(self) -> list[str]:
        """Cancel every job at every site; return a line for each site where some may live on."""
        self.leave()
        _, remains = cancel_everywhere(self._slurm)
        return remains

    def _watch(self, site: SlurmSite) -> None:
        carried: dict[str, bytes] = {}
        while not self._over.is_set():
            self._looks.put((site, look_at(self._run, site)))
            carry(self._run, self._slurm, site, carried)
            self._over.wait(self._slurm.poll_seconds)


def look_at(run: Run, site: SlurmSite, logs: bool = True) -> Look:
    """Look at a site once and bring home what its jobs wrote; a site that cannot be reached is a look without jobs."""
    mirror = Mirror(run, site.name)
    script = poll_script(site, mirror.offsets(), logs)
    try:
        done = site.shell.run(["bash", "-lc", script], timeout_seconds=LOOK_SECONDS)
        look = parse_poll(done.stdout)
        mirror.write(look.chunks)
    except (HetrlError, OSError) as error:
        return Look(None, (), str(error))
    return look


def carry(run: Run, slurm: SlurmRun, site: SlurmSite, carried: dict[str, bytes]) -> None:
    """Bring the endpoint of a site's gateway to those that dial it directly, when it has changed.

    `carried` is what each destination has; one that cannot be reached is tried again at the next look.
    """
    for each in (each for each in slurm.carried if each.source == site.name):
        here = run.site(site.name) / PurePosixPath(each.origin).name
        data = here.read_bytes() if here.exists() else b""
        if not data or carried.get(each.destination) == data:
            continue
        target = shlex.quote(each.destination)
        try:
            slurm.site(each.target).shell.check(
                ["sh", "-c", f"cat >{target}.part && mv {target}.part {target}"],
                timeout_seconds=CARRY_SECONDS,
                doing=f"tell it where the gateway of {site.name} is",
                stdin=data.decode(),
            )
        except HetrlError:
            continue
        carried[each.destination] = data


def cancel_everywhere(slurm: SlurmRun, remove: bool = False) -> tuple[int, list[str]]:
    """Cancel the jobs of the run at all sites; return how many there were, and a line for each site not done.

    `remove` deletes the run's directories there too, so that what a site takes up late finds nothing.
    """

    def cancel(site: SlurmSite) -> tuple[int, str]:
        done = site.shell.run(["bash", "-lc", cancel_script(site, remove)], timeout_seconds=CANCEL_SECONDS)
        return parse_cancelled(done.stdout, site)

    answers, errors = at_every_site(slurm.sites, cancel)
    remains = [said for _, said in answers.values() if said] + [str(error) for error in errors]
    return sum(count for count, _ in answers.values()), remains
