"""Runs with emulated engines of problems that are made in code: what the benches `prediction` and `control` share."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from _results import ROOT as ROOT  # it puts the repository before this folder, whose launch.py is a bench
from rich.console import Console

from hetrl.describe.algorithm import AlgorithmSection
from hetrl.describe.experiment import Batch, Data, Experiment, Model, Reward, TopologySection
from hetrl.describe.launching import Launch
from hetrl.describe.links import LinkEntry
from hetrl.describe.sites import ScenarioFile, SiteFile
from hetrl.errors import HetrlError
from hetrl.files import parse_lines
from hetrl.plan.plan import Plan
from hetrl.problem import Files, Problem, workload_of
from launch.collect import log_planned
from launch.life import Manner, live
from launch.local import prepare_local
from launch.rehearsal import Settings, rehearsed
from launch.run_directory import Run

Row = dict[str, Any]


@dataclass(frozen=True)
class Ran:
    """What a run left: events, a row per step, and the summary."""

    events: Sequence[Row]
    rows: Sequence[Row]
    summary: Row

    def times(self, kind: str) -> list[float]:
        """Return when the events of a kind happened, in seconds of the system's clock."""
        return [event["time"] for event in self.events if event["kind"] == kind]


def with_experiment(problem: Problem, name: str, gang_timeout: str = "00:10:00") -> Problem:
    """Return a problem that was made in code with the experiment and the sites that are run."""
    workload = problem.workload
    steps, prompts = workload.optimizer_steps_per_iteration, workload.samples // workload.samples_per_prompt
    assert steps % workload.epochs == 0 and prompts % (steps // workload.epochs) == 0
    experiment = Experiment(
        name=name,
        model=Model(architecture=workload.actor.name, dtype="bf16" if workload.weight_bytes == 2 else "fp32"),
        algorithm=AlgorithmSection(
            kind="ppo" if workload.algorithm == "ppo" else "grpo",
            mode="async" if workload.mode == "async" else "sync",
            max_staleness=workload.max_staleness,
            samples_per_prompt=workload.samples_per_prompt,
            minibatches=steps // workload.epochs,
            epochs=workload.epochs,
            kl_coefficient=0.001 if workload.reference else 0.0,
            kl_in="reward" if workload.kl_in_reward else "loss",
        ),
        reward=Reward(kind="model", architecture=workload.reward.name) if workload.reward else Reward(),
        data=Data(kind="jsonl", path="made-up"),
        batch=Batch(
            samples=workload.samples,
            prompt_tokens=workload.prompt_tokens,
            response_tokens=workload.response.maximum,
        ),
        steps=1,
        topology=TopologySection(scenario="made-up"),
        launch=Launch(queue_timeout=gang_timeout, gang_timeout=gang_timeout),
    )
    assert replace(workload_of(experiment), response=workload.response) == workload  # the run's job is the plan's
    sites = tuple(SiteFile(name=site.name) for site in problem.topology.sites)
    links = (LinkEntry(between=one.between, delay_ms=one.delay_ms, gbps=one.gbps) for one in problem.topology.links)
    return replace(problem, files=Files(experiment, ScenarioFile(sites=sites, links=tuple(links))))


def run_emulated(
    problem: Problem,
    plan: Plan,
    settings: Settings,
    beside: Callable[[Run, threading.Event], None] | None = None,
    *,
    ends: bool = True,
) -> Ran:
    """Run a plan to its end with emulated engines and return what it left; nothing of it stays, unless it fails.

    `beside` is called in a thread of its own once the run is there, with what is set when it is over. Raises HetrlError
    where the run fails, unless it need not come to an end.
    """
    with tempfile.TemporaryDirectory(prefix="hetrl-emulated-") as directory:
        os.environ["HETRL_RUNS"] = str(Path(directory) / "runs")
        rehearsal, _ = rehearsed(problem, settings, Path(directory))
        config = Path(directory) / "emulated.yaml"
        config.write_text(yaml.safe_dump(rehearsal.experiment.model_dump(mode="json")))
        prepared = prepare_local(rehearsal, plan, config)
        log_planned(prepared.run, plan, rehearsal.experiment)
        over = threading.Event()
        thread = threading.Thread(target=beside or (lambda run, over: None), args=(prepared.run, over))
        thread.start()
        with (Path(directory) / "talk").open("w") as talk:
            outcome, _, _ = live(prepared.run, plan, prepared.executor, Console(file=talk), Manner(yes=True))
        over.set()
        thread.join()
        if outcome.phase != "finished" and ends:
            kept = shutil.move(prepared.run.path, tempfile.mkdtemp(prefix="hetrl-failed-"))
            raise HetrlError(f"the emulated run is {outcome.phase}: {outcome.cause}; it is kept in {kept}")
        run = prepared.run
        events, rows = (
            [*parse_lines(path.read_bytes())] if path.exists() else [] for path in (run.events, run.metrics)
        )
        return Ran(events, rows, json.loads(run.summary.read_text()) if run.summary.exists() else {})
