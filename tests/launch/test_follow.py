from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from hetrl.files import read_lines
from hetrl.runtime.wire import CONTROLLER
from launch import follow, local
from launch.executor import Exit, Started
from launch.follow import SILENCE_SECONDS, Watched, judge
from launch.local import stop_processes
from launch.render import Command, Job
from launch.state import State
from tests.launch.launch_cases import (
    CONTROLLER_HEAD,
    ENDLESS_CONTROLLER,
    GOOD_CONTROLLER,
    SLEEPER,
    job,
    launch,
    left_of,
    member,
    plain_console,
    quick_run,
)

DIES = "import sys; print('loading', flush=True); print('ValueError: no such layer', file=sys.stderr); sys.exit(1)"


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setenv("HETRL_RUNS", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(local, "GRACE_SECONDS", 2.0)
    monkeypatch.setattr(follow, "WORD_SECONDS", 1.0)
    monkeypatch.setattr(follow, "LEAVE_SECONDS", 1.0)
    run = quick_run()
    yield run
    stop_processes(run, [])


def launched(run, **programs):
    console = plain_console()
    outcome = launch(run, [job(run, "alpha", **programs)], console)
    assert left_of(run) == []
    return outcome, console.file.getvalue(), json.loads(run.state.read_text())


def test_run_that_finishes_shows_its_lines_and_leaves_nothing_behind(run):
    outcome, text, state = launched(run, gateway=SLEEPER, controller=GOOD_CONTROLLER)
    assert (outcome.phase, outcome.exit_code, state["phase"]) == ("finished", 0, "finished")
    assert text.splitlines() == [
        "alpha: gang started, 2 processes",
        "alpha/actor_training/0 is ready (megatron-core 0.16.1)",
        "GO: 1 member is ready, the run begins",
        "warm start: 20 supervised steps, sampled reward 0.24",
        "step 1/2  reward 0.25  3.1 s (gen 1.2, train 0.8, sync 0.4)  v1",
        "step 2/2  reward 0.50  3.1 s (gen 1.2, train 0.8, sync 0.4)  v2",
    ]
    assert [row["step"] for row in read_lines(run.metrics)] == [1, 2]
    assert json.loads(run.summary.read_text())["steps"] == 2
    codes = {process["name"]: process["code"] for process in state["processes"]}
    assert codes == {"gateway": -15, "controller": 0}


def test_member_that_lingers_after_the_end_is_stopped(run):
    outcome, _, state = launched(run, controller=GOOD_CONTROLLER, actor_training__0=SLEEPER)
    assert outcome.phase == "finished"
    assert {process["name"]: process["code"] for process in state["processes"]}["actor_training-0"] == -15


def test_rank_that_dies_is_reported_with_its_last_word_and_its_log(run):
    outcome, _, state = launched(run, gateway=SLEEPER, controller=ENDLESS_CONTROLLER, actor_training__1=DIES)
    log = Path(run.id) / "logs" / "alpha" / "actor_training-1.log"
    said = f"alpha: actor_training rank 1 exited with code 1: ValueError: no such layer; see {log}"
    assert (outcome.phase, outcome.exit_code, outcome.cause) == ("failed", 1, said)
    assert (state["phase"], state["cause"], state["exit_code"]) == ("failed", said, 1)


def test_gateway_that_is_killed_is_started_again_and_the_run_goes_on(run):
    dies_once = (
        "import os, pathlib, signal, time\n"
        "first = pathlib.Path('was-here')\n"
        "if not first.exists(): first.touch(); os.kill(os.getpid(), signal.SIGKILL)\n"
        "pathlib.Path('came-back').touch(); time.sleep(600)"
    )
    waits = "import pathlib, time\nwhile not pathlib.Path('came-back').exists(): time.sleep(0.01)\n"
    outcome, text, state = launched(run, gateway=dies_once, controller=waits + GOOD_CONTROLLER)
    assert (outcome.phase, outcome.exit_code) == ("finished", 0)
    assert "alpha: gateway was ended by SIGKILL and started again" in text.splitlines()
    assert {process["name"]: process["code"] for process in state["processes"]} == {"gateway": -15, "controller": 0}


def test_gateway_that_keeps_being_killed_ends_the_run(run, monkeypatch):
    monkeypatch.setattr(local, "GATEWAY_RESTARTS", 2)
    dies = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    outcome, text, _ = launched(run, gateway=dies, controller=ENDLESS_CONTROLLER)
    assert (outcome.phase, text.count("started again")) == ("failed", 2)
    assert "alpha: gateway was ended by SIGKILL" in outcome.cause


def test_controller_says_why_and_with_which_exit_code(run):
    failing = CONTROLLER_HEAD + "events.append('failed', cause='beta: not ready', exit_code=6); sys.exit(6)"
    outcome, _, state = launched(run, controller=failing, actor_generation__0=SLEEPER)
    assert (outcome.phase, outcome.exit_code) == ("failed", 6)
    assert outcome.cause.splitlines() == ["beta: not ready", f"see {run.id}/logs"]
    assert state["exit_code"] == 6


def test_cause_of_the_controller_comes_with_the_member_that_died(run):
    waits = "time.sleep(0.5); events.append('failed', cause='alpha/actor_training/1 fell silent', exit_code=1)"
    outcome, _, _ = launched(run, controller=CONTROLLER_HEAD + waits, actor_training__1=DIES)
    first, second = outcome.cause.splitlines()
    assert first == "alpha/actor_training/1 fell silent"
    assert second.startswith("alpha: actor_training rank 1 exited with code 1: ValueError")


@pytest.mark.parametrize(
    ("ending", "told"),
    [
        ("sys.exit(0)", "alpha: controller ended without a result"),
        ("raise KeyError('x')", "alpha: controller exited with code 1: KeyError: 'x'"),
        ("__import__('os').kill(__import__('os').getpid(), 9)", "alpha: controller was ended by SIGKILL"),
    ],
)
def test_controller_that_is_gone_without_a_word_ends_the_run(run, ending, told):
    outcome, _, state = launched(run, gateway=SLEEPER, controller=CONTROLLER_HEAD + ending)
    assert (outcome.exit_code, state["phase"]) == (1, "failed")
    assert outcome.cause.startswith(told)


def test_disk_that_is_full_stops_the_run(run):
    # The gateway makes room when it is stopped: a report can be written then, and /dev/full is endless to a reader.
    frees = (
        "import os, pathlib, signal, sys, time\n"
        "def end(*_):\n    os.unlink('../../metrics.jsonl')\n    sys.exit()\n"
        "signal.signal(signal.SIGTERM, end); pathlib.Path('armed').touch(); time.sleep(600)"
    )
    waits = "while not __import__('os').path.exists('armed'): time.sleep(0.02)"
    run.metrics.symlink_to("/dev/full")
    outcome, _, state = launched(run, gateway=frees, controller=f"{CONTROLLER_HEAD}{waits}\nstep(1, 2, 0.5)\n{SLEEPER}")
    assert (outcome.phase, outcome.exit_code) == ("failed", 1)
    assert outcome.cause == f"{run.id}: No space left on device; make room, then submit again"
    assert state["phase"] == "failed"


def test_defect_of_the_launcher_stops_the_run_and_leaves_its_traceback(run, monkeypatch):
    def defect(*arguments):
        raise RuntimeError("boom")

    monkeypatch.setattr(follow, "judge", defect)
    outcome, _, state = launched(run, gateway=SLEEPER, controller=ENDLESS_CONTROLLER)
    assert outcome.cause == f"the launcher failed: RuntimeError: boom; see {run.id}/logs/launcher.log"
    assert "RuntimeError: boom" in run.launcher_log.read_text()
    assert state["phase"] == "failed"


def test_program_that_cannot_start_stops_those_that_did(run):
    missing = Job("beta", "gang", "gang", (Command(member("beta", "x"), ("/no/program",), {}),))
    outcome = launch(run, [job(run, "alpha", gateway=SLEEPER), missing], plain_console())
    assert outcome.cause == "beta: cannot start x: No such file or directory: /no/program"
    assert left_of(run) == []


LEAD, ROLLOUTS = (Started("alpha", "gang", CONTROLLER, "gang"), Started("beta", "gang", "gang", "gang", spare=True))
SILENT = State(phase="running", silent={"alpha": "squeue did not answer"})


@dataclass
class Slurm:
    """What a follower asks an executor, with jobs that live."""

    living: list[Started]
    lag_seconds: float = 1.0

    def alive(self) -> list[Started]:
        return self.living


def later(watched: Watched) -> float:
    return watched.silent["alpha"] + SILENCE_SECONDS + 1.0


def test_lead_site_that_is_silent_ends_the_run_once_the_others_have_ended(run):
    watched = Watched()
    watched.add([], SILENT)
    assert judge(run, watched, SILENT, Slurm([LEAD, ROLLOUTS]), later(watched)) is None  # beta hears of alpha
    watched.add([Exit(ROLLOUTS, 1, "FAILED")], SILENT)
    assert judge(run, watched, SILENT, Slurm([LEAD]), watched.silent["alpha"] + 1.0) is None  # alpha may answer yet
    outcome = judge(run, watched, SILENT, Slurm([LEAD]), later(watched))
    assert outcome is not None and (outcome.phase, outcome.exit_code) == ("failed", 4)
    assert outcome.cause.startswith("alpha, which leads, does not answer, and all jobs elsewhere have ended: squeue")


def test_lead_site_that_is_silent_behind_the_end_of_the_others_is_waited_for(run):
    watched = Watched()
    watched.add([Exit(ROLLOUTS, 1, "TIMEOUT")], State(phase="running"))
    watched.add([], SILENT)
    assert judge(run, watched, SILENT, Slurm([LEAD]), later(watched)) is None
    watched.add([], State(phase="running"))
    assert watched.silent == {}
