"""A small run for the tests of the launcher: three sites of `cpu` devices, and Python programs that act as members."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from io import StringIO
from pathlib import Path

from rich.console import Console

from hetrl.describe.experiment import Experiment
from hetrl.plan.plan import Plan
from lab.quick import quick_plan
from launch.collect import log_planned
from launch.follow import Outcome
from launch.life import live
from launch.local import LocalExecutor, carrying
from launch.render import Command, Job, Process
from launch.run_directory import Run, create_run

ROOT = Path(__file__).parents[2]
SLEEPER = "import time; time.sleep(600)"
CONTROLLER_HEAD = """
import sys, time
from hetrl.files import EventLog, append_line
events = EventLog(__import__("pathlib").Path("events.jsonl"), "alpha")
def step(number, of, reward):
    seconds = {"generation_wait": 1.2, "actor_training": 0.8, "weight_sync": 0.4, "iteration": 3.1}
    append_line(__import__("pathlib").Path("metrics.jsonl"), {"step": number, "reward": reward})
    events.append("step", step=number, of=of, reward=reward, seconds=seconds)
"""
GOOD_CONTROLLER = (
    CONTROLLER_HEAD
    + """
events.append("member_ready", member="alpha/actor_training/0", engines={"megatron-core": "0.16.1"})
events.append("go", members=["alpha/actor_training/0"])
events.append("warm_start", steps=20, reward=0.24)
for number in (1, 2):
    events.append("weights_published", version=number, bytes=8, seconds=0.1, digest="d", to=[])
    step(number, 2, number / 4)
append_line(__import__("pathlib").Path("summary.json"), {"run": "r", "steps": 2})
events.append("finished")
"""
)
ENDLESS_CONTROLLER = CONTROLLER_HEAD + "events.append('go', members=['m']); step(1, 9, 0.5); time.sleep(600)"


def quick_gpus(plan: Plan) -> dict[str, str]:
    return {device: "cpu" for task in plan.tasks.values() for device in task.devices}


def quick_experiment(**changes: object) -> Experiment:
    document = {
        "name": "quick",
        "model": {"architecture": "qwen3-0.6b"},
        "data": {"kind": "larger-digit"},
        "batch": {"samples": 16, "prompt_tokens": 4, "response_tokens": 4},
        "steps": 2,
        "topology": {"scenario": "none.yaml"},
    }
    return Experiment.model_validate({**document, **changes})


def quick_run() -> Run:
    """Make a run under HETRL_RUNS that is planned and not started."""
    run = create_run("quick", "name: quick\n", quick_plan())
    log_planned(run, quick_plan(), quick_experiment())
    return run


def job(run: Run, site: str, **programs: str) -> Job[Command]:
    """Return a gang job whose processes run these Python programs; `role__1` is rank 1 of a task."""
    tasks = [
        Command(member(site, name), ("python", "-c", code), {"HETRL_RUN": run.id}) for name, code in programs.items()
    ]
    return Job(site, "gang", "gang", tuple(tasks))


def member(site: str, name: str) -> Process:
    role, _, rank = name.partition("__")
    world = (f"{site}/{site}-0/{rank}",) if rank else ()
    return Process(role, int(rank) if rank else None, (), world, f"{site}/{site}-0")


def launch(run: Run, jobs: Sequence[Job[Command]], console: Console) -> Outcome:
    """Start all jobs here and follow the run to its end."""
    outcome, remains, _ = live(run, quick_plan(), partial(LocalExecutor, run, jobs), console)
    assert not remains
    return outcome


def until(condition: Callable[[], object], what: str, seconds: float = 20) -> None:
    """Wait for a condition; a test fails by name where it does not come true."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.02)


def left_of(run: Run) -> list[int]:
    return [process.pid for process in carrying(run)]


def plain_console() -> Console:
    return Console(file=StringIO(), width=80)


def drive(programs: dict[str, str]) -> None:
    """Be a launcher of its own: start a run with these programs at alpha and follow it (for tests of signals)."""
    run = quick_run()
    print(run.id, flush=True)
    outcome = launch(run, [job(run, "alpha", **programs)], Console())
    print(outcome.phase, outcome.cause, flush=True)
    sys.exit(outcome.exit_code)
