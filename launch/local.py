"""The local executor: every site is a group of processes on this machine.

Each process leads a session of its own, so that Ctrl-C at the terminal does not reach it and one signal reaches what it
started in its group. What left the group still carries HETRL_RUN and HETRL_SITE_DIRECTORY in its environment: the sweep
finds it by both, for two runs of one name and second may lie in different directories. Each process has a temporary
directory of its own, which goes when the process has ended, however it did.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil

import hetrl
from hetrl.cost.charges import held_by_site
from hetrl.errors import HetrlError
from hetrl.files import EventLog
from hetrl.plan.plan import Plan
from hetrl.problem import Problem
from hetrl.runtime.checkpoints.places import EarlierRun
from hetrl.runtime.emulated.costs import write_costs
from hetrl.runtime.temporary import make_private, remove_private, remove_unheld
from hetrl.runtime.wire import GATEWAY
from hetrl.runtime.wire.keys import make_run_keys
from launch.executor import Exit, Prepared, Started
from launch.interrupts import signal_name
from launch.ports import gateway_endpoints
from launch.render import ARRAY, VISIBLE, Command, Job, commands, render
from launch.run_directory import Run, create_run, stage, with_absolute_paths, write_scripts
from launch.site_ways import links_of, relay_secrets
from launch.state import State

GRACE_SECONDS = 10.0  # from SIGTERM to SIGKILL: a rollout server closes its workers in that time
SWEEP_SECONDS = 3.0
GATEWAY_RESTARTS = 100  # of one gateway: one that keeps crashing ends the run
ROLLOUT_RESTARTS = 3  # of one: the run does without it
_SAME_CREATION_SECONDS = 2.0  # the system derives creation times from its boot time, which moves with the clock


def prepare_local(
    problem: Problem,
    plan: Plan,
    config: Path,
    *,
    continues: Mapping[str, Sequence[EarlierRun]] = {},
    dry_run: bool = False,
) -> Prepared:
    """Make the run directory with all that its sites read; nothing is started, of a dry run never.

    `continues`: see `stage`. Raises UsageError for a port that is taken and for two sites without a way, HetrlError
    where the directory cannot be written.
    """
    used = [site for site in problem.scenario.sites if site.name in plan.site_order]
    gateways = gateway_endpoints(used)
    links = links_of(used, gateways, plan.weight_sync.routes)
    secrets = relay_secrets(site for site in used if links[site.name].relays)
    keys = make_run_keys(plan.site_order)
    gpus = {device.id: device.gpu for device in problem.topology.devices}
    run = create_run(problem.experiment.name, config.read_text(encoding="utf-8"), plan, dry=dry_run)
    emulates = problem.experiment.launch.emulates
    rendered = render(plan, gpus, emulates=emulates)
    jobs = commands(rendered, run.id, gpus, {site.name: site.prefix for site in used})
    held = held_by_site(plan, problem.topology)
    experiments = dict.fromkeys(plan.site_order, with_absolute_paths(problem.experiment))
    stage(run, experiments, plan, gpus, held, gateways, keys, links, secrets, continues=continues)
    for site in plan.site_order if emulates else ():
        write_costs(run.site(site), problem.model)
    write_scripts(run, jobs)
    begins_without = problem.experiment.launch.begins_without
    return Prepared(run, partial(LocalExecutor, run, jobs, begins_without=begins_without))


class LocalExecutor:
    """Starts, watches and stops the processes of one run; `state` returns what its events say by then.

    A gateway that a signal ended is started again, for it holds nothing that its members do not hold too, and so is a
    rollout of an array. One that exits by itself says why. (Slurm jobs do this themselves.)
    """

    lag_seconds = 0.0
    outlives = adopts = False
    elsewhere = ""

    def __init__(
        self,
        run: Run,
        jobs: Sequence[Job[Command]],
        events: EventLog,
        state: Callable[[], State],
        *,
        begins_without: bool = False,
    ) -> None:
        """Nothing is started yet."""
        self.begins_without = begins_without
        self._run, self._jobs, self._events, self._state = run, jobs, events, state
        self._running: dict[tuple[str, str], tuple[Command, subprocess.Popen[bytes]]] = {}
        self._leaders: list[psutil.Process] = []
        self._temporary: dict[int, Path] = {}  # by the number of the process, which holds it
        self._restarts = Counter[tuple[str, str]]()
        arrays = (job for job in jobs if job.kind == ARRAY)
        self._revivable = {(job.site, command.process.name) for job in arrays for command in job.tasks}
        self._stopped = False

    def start(self, interrupted: Callable[[], int | None] = lambda: None) -> None:
        """Start every job and write what identifies each process: name, pid and creation time."""
        remove_unheld()  # of runs that were killed together with their launcher
        for job in self._jobs:
            processes = [self._start(job.site, command) for command in job.tasks]
            self._events.append("submitted", site=job.site, job=job.name, job_kind=job.kind, processes=processes)

    def _start(self, site: str, command: Command) -> dict[str, Any]:
        name, held = command.process.name, make_private()
        added = {**command.environment, _DIRECTORY: str(self._run.site(site)), "TMPDIR": str(held.path)}
        with self._run.log(site, name).open("ab") as log:
            try:
                started = subprocess.Popen(
                    [sys.executable if word == "python" else word for word in command.argv],
                    cwd=self._run.site(site),
                    env=_environment(added),
                    pass_fds=held.lock,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            except OSError as error:
                remove_private(held.path)
                raise HetrlError(f"{site}: cannot start {name}: {error.strerror}: {error.filename}") from None
            finally:
                held.leave()
        self._running[site, name], self._temporary[started.pid] = (command, started), held.path
        leader = psutil.Process(started.pid)
        self._leaders.append(leader)
        return {"name": name, "pid": started.pid, "created": leader.create_time()}

    def poll(self) -> list[Exit]:
        """Return the processes that ended since the last call, without the gateways that were started again."""
        exits = []
        for key, (command, process) in list(self._running.items()):
            if (code := process.poll()) is not None:
                del self._running[key]
                remove_private(self._temporary.pop(process.pid))
                remove_unheld()  # the weights of the last replica here
                if not self._revived(key[0], command, code):
                    exits.append(Exit(self._started(key[0], command), code))
        return exits

    def _revived(self, site: str, command: Command, code: int) -> bool:
        """Start what a signal ended again while the run goes on; return whether it is one that can be.

        A code of 128 and a signal's number is what a process says that went as one did which it depends on.
        """
        state, key = self._state(), (site, command.process.name)
        most = GATEWAY_RESTARTS if command.process.role == GATEWAY else 0
        if key in self._revivable and state.phase == "running":
            most = ROLLOUT_RESTARTS
        number = -code if code < 0 else code - 128
        if number <= 0 or self._stopped or state.ended or self._restarts[key] >= most:
            return False
        self._restarts[key] += 1
        self._events.append("process_exited", site=site, process=command.process.name, code=code)
        process = self._start(site, command)
        self._events.append("restarted", site=site, process=process, signal=signal_name(number))
        return True

    def alive(self) -> list[Started]:
        """Return the processes that were running at the last poll."""
        return [self._started(site, command) for (site, _), (command, _) in self._running.items()]

    def _started(self, site: str, command: Command) -> Started:
        process = command.process
        return Started(site, process.name, process.role, process.spoken, (site, process.name) in self._revivable)

    def leave(self) -> None:
        """End every process of the run."""
        self.stop()

    def stop(self) -> list[str]:
        """End every process of the run; when it returns none is left."""
        self._stopped = True
        stop_processes(self._run, self._leaders)
        for path in self._temporary.values():
            remove_private(path)
        return []


def _environment(added: Mapping[str, str]) -> dict[str, str]:
    """Return the launcher's environment with what a process adds, without what only the launcher should have."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("HETRL_") and name != VISIBLE}
    code = str(Path(hetrl.__file__).resolve().parent.parent)  # the members run the launcher's version
    paths = [code, *filter(None, [inherited.get("PYTHONPATH")])]
    return {**inherited, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1", "SPT_NOENV": "1", **added}


# SPT_NOENV keeps setproctitle, which vLLM's workers use, from writing a title over the environment that the sweep
# reads (https://github.com/dvarrazzo/py-setproctitle#environment-variables).
_DIRECTORY = "HETRL_SITE_DIRECTORY"


def processes_of(records: Iterable[Mapping[str, Any]]) -> list[psutil.Process]:
    """Return the recorded processes that still live; a number that another process has by now is not one of them."""
    found = []
    for record in records:
        try:
            process = psutil.Process(record["pid"])
        except psutil.NoSuchProcess:
            continue
        if abs(process.create_time() - record["created"]) < _SAME_CREATION_SECONDS and alive(process):
            found.append(process)
    return found


def stop_processes(run: Run, leaders: Iterable[psutil.Process]) -> int:
    """End the process groups of the leaders, then all else that carries this run; return how many processes lived.

    Then nothing holds their temporary directories, which are removed.
    """
    leaders = [leader for leader in leaders if alive(leader)]
    found = {leader.pid for leader in leaders}
    _signal_groups(leaders, signal.SIGTERM)
    _wait(leaders, GRACE_SECONDS)
    _signal_groups(leaders, signal.SIGKILL)
    for attempt in (signal.SIGTERM, signal.SIGKILL, signal.SIGKILL):
        remaining = carrying(run)  # anew each time: what is being ended may have started more meanwhile
        if not remaining:
            break
        found.update(process.pid for process in remaining)
        _signal(remaining, attempt)
        _wait(remaining, SWEEP_SECONDS)
    remove_unheld()
    return len(found)


def carrying(run: Run) -> list[psutil.Process]:
    """Return the living processes that were started for this run, this process and its parents apart."""
    spared = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    found = []
    for process in psutil.process_iter():
        try:
            environment = {} if process.pid in spared else process.environ()
            if _is_of(run, environment) and alive(process):
                found.append(process)
        except (psutil.Error, OSError):  # another user's, a zombie, or gone meanwhile
            continue
    return found


def _is_of(run: Run, environment: Mapping[str, str]) -> bool:
    directory = environment.get(_DIRECTORY)
    return environment.get("HETRL_RUN") == run.id and directory is not None and run.path in Path(directory).parents


def alive(process: psutil.Process) -> bool:
    """Return whether a process still runs; one that only waits to be reaped does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _signal_groups(leaders: Iterable[psutil.Process], number: signal.Signals) -> None:
    for leader in leaders:
        if alive(leader):
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(leader.pid, number)


def _signal(processes: Iterable[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        with suppress(psutil.Error):
            process.send_signal(number)


def _wait(processes: Iterable[psutil.Process], seconds: float) -> None:
    """Wait until all are gone, at most so long; nobody is reaped here, so exit codes stay with their parent."""
    deadline = time.monotonic() + seconds
    while any(alive(process) for process in processes) and time.monotonic() < deadline:
        time.sleep(0.02)
