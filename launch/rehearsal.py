"""A rehearsal: an experiment as it is run with emulated engines, and what came of it beside what was predicted.

stand-ins   for data, models and weights that are not on this machine: each is a finding; none at the sites
speed       so that the steps take about a minute
bytes       so few that a version of the weights has some megabytes
tokens      so few on this machine that one process holds those of a batch: each counts as several
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hetrl.cost.weight_sync import held_bytes
from hetrl.describe.experiment import Batch, Data, Experiment, Model
from hetrl.describe.launching import Emulation, Launch, seconds_of
from hetrl.describe.models import critic_of
from hetrl.describe.sites import SiteFile
from hetrl.errors import HetrlError, UsageError
from hetrl.plan.plan import Plan
from hetrl.problem import Problem
from hetrl.runtime.data.prompts import open_source
from hetrl.runtime.weights.model_directory import TINY, ensure_model_directory
from hetrl.runtime.weights.tiny_model import write_tiny_model
from hetrl.workload import ACTOR_TRAINING, architecture

WALLTIME_AT_SITES = "00:30:00"  # a short job starts soon
MOST_WEIGHT_BYTES = 4e6  # of a version: as much goes to every replica that has none
WANTED_SECONDS, LEAST_SPEED = 90.0, 0.1
MOST_TOKENS = 2_000_000  # of a batch, in the controller's memory with all that it knows of each
LEAST_PROMPT_TOKENS = 8  # so many characters tell made-up prompts apart
PROMPTS = 256  # at least, made up where the data is not here


@dataclass(frozen=True)
class Settings:
    """How many steps are taken, of which the last `counted` count, and how the engines are emulated."""

    steps: int
    counted: int
    emulation: Emulation


@dataclass(frozen=True)
class Compared:
    """Seconds of a task, or of the whole iteration, as predicted and as rehearsed."""

    name: str
    predicted: float
    rehearsed: float


def settings_of(
    plan: Plan,
    problem: Problem,
    steps: int | None = None,
    speed: float | None = None,
    noise: float = 0.1,
    bytes_share: float | None = None,
    *,
    whole_texts: bool = False,
) -> Settings:
    """Return how a plan is rehearsed; what is not given follows from its prediction.

    With `whole_texts` a token is a token, however many there are. The first steps do not count: nothing is drawn ahead
    of the first one, and in mode async 1 + max_staleness batches.
    """
    staleness = problem.workload.staleness
    before = 1 + (2 * (1 + staleness) if staleness else 0)
    steps = max(steps or before + 4, before + 1)
    wanted = plan.predicted.iteration_seconds * steps / WANTED_SECONDS
    held = held_bytes(ACTOR_TRAINING, plan.tasks[ACTOR_TRAINING], problem.model)
    emulation = Emulation(
        speed=speed or max(float(f"{wanted:.2g}"), LEAST_SPEED),
        noise=noise,
        bytes_share=bytes_share or min(float(f"{MOST_WEIGHT_BYTES / sum(held.values()):.2g}"), 1.0),
        tokens_each=1 if whole_texts else _tokens_each(problem),
        seed=problem.experiment.seed,
    )
    return Settings(steps, steps - before, emulation)


def _tokens_each(problem: Problem) -> int:
    """Return what a token counts as, so that a batch has few enough and prompts still differ."""
    batch = problem.experiment.batch
    tokens = batch.samples * (batch.prompt_tokens + problem.workload.response.mean)
    return max(min(math.ceil(tokens / MOST_TOKENS), batch.prompt_tokens // LEAST_PROMPT_TOKENS), 1)


def rehearsed(problem: Problem, settings: Settings, directory: Path | None) -> tuple[Problem, tuple[str, ...]]:
    """Return the problem whose run is the rehearsal, and a line for each thing that was found not to be as it shall.

    What stands in for models and data is written into `directory`; without one the rehearsal is at the sites, where all
    is to be as the experiment says.
    """
    experiment, files = problem.experiment, problem.files
    assert files is not None  # a problem without files has no experiment
    stood_in, findings = experiment, tuple[str, ...]()
    if directory is not None:
        stood_in, findings = _stand_ins(experiment, settings.emulation.tokens_each, directory)
    launch = experiment.launch.model_dump() | {"engines": "emulated", "emulation": settings.emulation}
    if directory is not None:
        launch["executor"] = "local"
    elif experiment.launch.walltime_seconds > seconds_of(WALLTIME_AT_SITES):
        launch["walltime"] = WALLTIME_AT_SITES
    left_out, findings_of_them = _never_ending(experiment)
    changed = {
        "name": f"{experiment.name}-rehearsal",
        "steps": settings.steps,
        **left_out,
        "critic": stood_in.critic.model_copy(update={"warmup_steps": 0}),
        "launch": Launch.model_validate(launch),
    }
    scenario = files.scenario
    if directory is not None:
        scenario = scenario.model_copy(update={"sites": tuple(map(_here, scenario.sites))})
    changed_files = replace(files, experiment=stood_in.model_copy(update=changed), scenario=scenario)
    return replace(problem, files=changed_files), (*findings, *findings_of_them)


def _never_ending(experiment: Experiment) -> tuple[dict[str, Any], list[str]]:
    """Return what stands in the place of what waits for right answers, and a line for each."""
    findings = []
    if experiment.warm_start is not None:
        findings.append("warm_start: emulated engines learn nothing; it is left out")
    if experiment.algorithm.dynamic_sampling:
        findings.append("algorithm.dynamic_sampling: emulated engines draw no right answers; it is left out")
    algorithm = experiment.algorithm.model_copy(update={"dynamic_sampling": None})
    return {"warm_start": None, "algorithm": algorithm}, findings


def _shortened(experiment: Experiment, tokens_each: int) -> Experiment:
    """Return the experiment with texts of so many times fewer tokens, and prompts that are so short."""
    batch, reward = experiment.batch, experiment.reward
    short_batch = Batch(
        samples=batch.samples,
        prompt_tokens=batch.prompt_tokens // tokens_each,
        response_tokens=math.ceil(batch.response_tokens / tokens_each),
    )
    if reward.overlong:
        buffer = math.ceil(reward.overlong.buffer_tokens / tokens_each)
        reward = reward.model_copy(update={"overlong": reward.overlong.model_copy(update={"buffer_tokens": buffer})})
    return experiment.model_copy(update={"batch": short_batch, "reward": reward})


def _here(site: SiteFile) -> SiteFile:
    """Return a site as a group of processes of this machine."""
    kept = ("name", "nodes", "gpus", "allocation", "engines", "delay_ms", "node_delay_ms", "price_per_gpu_hour")
    return SiteFile(**{key: getattr(site, key) for key in kept})


def _stand_ins(experiment: Experiment, tokens_each: int, directory: Path) -> tuple[Experiment, tuple[str, ...]]:
    """Return the experiment with something in the place of what is not here, and a line for each."""
    findings: list[str] = []
    if tokens_each > 1:
        experiment = _shortened(experiment, tokens_each)
    policy, tiny = experiment.model, directory / "model"
    missing = _missing("model.weights", policy)
    data = _missing_data(experiment.data)
    findings += filter(None, (missing, data))
    changed: dict[str, Any] = {}
    if missing or data or tokens_each > 1:  # a tokenizer and prompts that fit each other
        _write_model(tiny)
        changed["model"] = policy.model_copy(update={"weights": str(tiny)})
        changed["data"] = _made_up(directory / "prompts.jsonl", experiment)
    if experiment.reward.has_model:
        assert experiment.reward.architecture is not None
        judge = Model(architecture=experiment.reward.architecture, weights=experiment.reward.weights)
        if found := _missing("reward.weights", judge):
            findings.append(found)
            _write_model(tiny)
            changed["reward"] = experiment.reward.model_copy(update={"weights": str(tiny)})
    if experiment.algorithm.kind == "ppo" and (found := _missing("critic.weights", critic_of(experiment))):
        findings.append(found)
    return experiment.model_copy(update=changed), tuple(dict.fromkeys(findings))


def _missing(key: str, model: Model) -> str | None:
    """Return why a model cannot be loaded here; None where it can."""
    if model.architecture == TINY and model.weights is None:
        return None
    try:
        directory = ensure_model_directory(model, architecture(model.architecture), Path())
        if not (directory.path / "tokenizer.json").is_file():
            return f"{key}: {directory.path} has no tokenizer.json; a tiny model's stands in"
    except UsageError as error:
        return f"{key}: {str(error).removeprefix('model.weights: ')}; a tiny model stands in"
    return None


def _missing_data(data: Data) -> str | None:
    try:
        open_source(data)
    except HetrlError as error:
        return f"data: {str(error).removeprefix('data: ')}; made-up prompts stand in"
    return None


def _write_model(directory: Path) -> None:
    write_tiny_model(directory)
    (directory / "model.safetensors").touch()  # emulated engines load nothing


def _made_up(path: Path, experiment: Experiment) -> Data:
    """Write prompts of the longest length that the experiment allows: a character of the tiny model is a token.

    Those of a batch differ, or replicas would have them in their caches.
    """
    length, count = experiment.batch.prompt_tokens, max(PROMPTS, 2 * experiment.prompts)
    rows = ({"prompt": f"{n:0{length}}"[-length:], "answer": "0"} for n in range(count))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Data(kind="jsonl", path=str(path), template="plain")


# ---- what came of it


def compare(rows: Sequence[Mapping[str, Any]], plan: Plan, settings: Settings) -> list[Compared]:
    """Return each task, then the iteration; means over the steps that count, in seconds of the engines.

    An asynchronous iteration takes what lies between two versions.
    """
    predicted = {**plan.predicted.tasks, "iteration": plan.predicted.iteration_seconds}
    counted = rows[-settings.counted :]
    speed = settings.emulation.speed
    means = {name: statistics.fmean(row["seconds"].get(name, 0.0) for row in counted) for name in predicted}
    return [Compared(name, predicted[name], speed * means[name]) for name in predicted]


def document(
    compared: Sequence[Compared], settings: Settings, findings: Sequence[str], run: str, wall_seconds: float
) -> dict[str, Any]:
    """Return what `hetrl rehearse --json` prints."""
    return {
        "run": run,
        "steps": settings.steps,
        "counted_steps": settings.counted,
        **settings.emulation.model_dump(),
        "wall_seconds": round(wall_seconds, 1),
        "findings": list(findings),
        "tasks": {
            one.name: {"predicted_seconds": round(one.predicted, 4), "rehearsed_seconds": round(one.rehearsed, 4)}
            for one in compared
        },
    }


def ratio(one: Compared) -> float:
    """Return the rehearsed over the predicted seconds; NaN where nothing was predicted."""
    return one.rehearsed / one.predicted if one.predicted else math.nan
