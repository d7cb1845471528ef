"""Runs of given plans of one experiment, held against the plan that runs everything on one device.

In sync mode rewards are the same whatever the plan; losses and gradients differ by their last digits, which is the
rounding of float32 sums in another order. In async mode time decides which groups are trained first, and where weights
change in the middle of a response; the same are then the rewards of each prompt's samples that were drawn under the
first version from beginning to end, as all of the first batch are. In both modes the trainer finds tokens as likely as
generation did that drew them under the weights that a step starts from.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetrl.files import read_lines
from hetrl.plan.plan import Plan
from hetrl.problem import Problem, read_problem
from lab.planned.copies import Copies
from lab.planned.random_plans import plan_on_one_device, random_plan, write_experiment

ROUNDING = 1e-4  # relative, after two steps
SAME_POLICY = 1e-3  # mean difference of log-probs that two engines compute in float32 from the same weights
COMPARED = ("loss", "grad_norm", "kl", "kl_penalty", "reward_model", "value", "return", "value_loss", "value_grad_norm")
RUN_SECONDS = 900.0
FIRST_VERSION = 1
LOOK_SECONDS = 0.2
_OUTPUT = "launcher.log"


@dataclass(frozen=True)
class Ran:
    """A run of a plan: its rows of metrics, its wall time, and what it left behind."""

    plan: Plan
    rows: list[dict[str, Any]]
    seconds: float
    directory: Path


class PlannedRuns:
    """Runs of one experiment in one mode, all from the same weights.

    They are held against a run of the plan on one device. One in sync mode does for async mode, too: what is compared
    there are the samples of the first version, which are the same in both.
    """

    def __init__(
        self, copies: Copies, work: Path, mode: str, weights: Path, kind: str = "grpo", reference: Ran | None = None
    ) -> None:
        """Write the experiment into `work`, and run the plan on one device where no such run is given."""
        self._sync = mode == "sync"
        self._copies, self._work, self._config = copies, work, write_experiment(work, mode, weights, kind)
        self.problem: Problem = read_problem(self._config)
        self.reference = reference or self.run(plan_on_one_device(self.problem))

    def random_plan(self, seed: int, servers: int | None = None) -> Plan:
        """Return a random plan, of at most so many generation servers, which take the longest to start."""
        return random_plan(self.problem, seed, servers)

    def run(self, plan: Plan) -> Ran:
        """Run a plan to its end; raises CalledProcessError, with what the command said, where it fails."""
        return _run(self._copies, self._config, plan, self._work)

    def break_off(self, plan: Plan) -> None:
        """Start a run of a plan and kill its launcher after the first step; raises where it ends before."""
        earlier = _newest(self._work)
        _launch(self._copies, self._config, plan, self._work)
        deadline = time.monotonic() + RUN_SECONDS
        while (newest := _newest(self._work)) == earlier or not _rows(newest):
            ended = self._copies.wait(LOOK_SECONDS) is not None
            assert not ended and time.monotonic() < deadline, "the run ended before its first step did"
        self._copies.end()

    def disagreement(self, ran: Ran) -> str:
        """Say in what a run differs from that on one device; "" where they agree."""
        if len(ran.rows) != len(self.reference.rows):
            return f"{len(ran.rows)} steps instead of {len(self.reference.rows)}"
        for row in ran.rows:
            if row.get("mismatch", 0.0) > SAME_POLICY:
                return f"step {row['step']}: mismatch {row['mismatch']}: samples are of other weights than they say"
        if not self._sync:
            return _first_difference(_first_rewards(ran), _first_rewards(self.reference))
        for row, other in zip(ran.rows, self.reference.rows, strict=True):
            if difference := _difference(row, other):
                return f"step {row['step']}: {difference}"
        return ""


def make_weights(copies: Copies, work: Path) -> Path:
    """Train a tiny model until it is sometimes right; return its Hugging Face directory."""
    config = write_experiment(work, "sync")
    ran = _run(copies, config, plan_on_one_device(read_problem(config)), work)
    checkpoint = max((ran.directory / "checkpoints").glob("step-*"))
    return as_weights(checkpoint, work / "model", work / "weights")


def as_weights(checkpoint: Path, model: Path, weights: Path) -> Path:
    """Return `weights`, as which a checkpoint of a model is made a Hugging Face directory."""
    shutil.copytree(model, weights, ignore=shutil.ignore_patterns("*.safetensors"))
    for file in checkpoint.glob("model*.safetensors*"):
        shutil.copy(file, weights)
    return weights


def _run(copies: Copies, config: Path, plan: Plan, work: Path) -> Ran:
    start = time.monotonic()
    _launch(copies, config, plan, work)
    if (code := copies.wait(RUN_SECONDS)) != 0:
        said = (work / _OUTPUT).read_text()
        if code is not None:
            raise subprocess.CalledProcessError(code, "hetrl submit", stderr=said)
        copies.end()
        raise subprocess.TimeoutExpired("hetrl submit", RUN_SECONDS, stderr=said.encode())
    directory = _newest(work)
    return Ran(plan, _rows(directory), time.monotonic() - start, directory)


def _launch(copies: Copies, config: Path, plan: Plan, work: Path) -> None:
    file = work / "plan.json"
    file.write_text(json.dumps(plan.to_json()))
    environment = {**os.environ, "HETRL_RUNS": str(work / "runs")}
    copies.launch(["submit", str(config), "--plan", str(file), "--yes"], environment, work / _OUTPUT)


def _newest(work: Path) -> Path:
    """Return the directory of the run that was started last."""
    return max((work / "runs").iterdir(), key=lambda path: path.stat().st_mtime_ns)


def _rows(directory: Path) -> list[dict[str, Any]]:
    return list(read_lines(directory / "metrics.jsonl"))


def digests(ran: Ran) -> list[str]:
    """Return the digest of every weight version that the replicas served."""
    summary = json.loads((ran.directory / "summary.json").read_text())
    return [str(row["digest"]) for row in summary["weight_versions"]]


def samples_of(*runs: Path) -> dict[int, list[tuple[str, str]]]:
    """Return the prompts and responses of each step, where runs keep them; of one taken again, its last."""
    files = [file for run in runs for file in run.glob("sites/*/rollouts/step-*.jsonl")]
    return {
        int(file.stem.removeprefix("step-")): sorted((row["prompt"], row["response"]) for row in read_lines(file))
        for file in files
    }


def _first_rewards(ran: Ran) -> dict[str, list[float]]:
    """Return by prompt the rewards of its samples, of those prompts of which all are of the first version alone."""
    found, later = dict[str, list[float]](), set[str]()
    for file in ran.directory.rglob("rollouts/step-*.jsonl"):
        for sample in read_lines(file):
            found.setdefault(sample["prompt"], []).append(_by_rule(sample))
            if {*sample["versions"]} != {FIRST_VERSION}:
                later.add(sample["prompt"])
    return {prompt: sorted(rewards) for prompt, rewards in found.items() if prompt not in later}


def _first_difference(found: Mapping[str, list[float]], expected: Mapping[str, list[float]]) -> str:
    both = sorted({*found} & {*expected})
    if not both:
        return "no prompt was drawn under the first version in both runs"
    for prompt in both:
        if found[prompt] != expected[prompt]:
            return f"{prompt!r}: rewards {found[prompt]} instead of {expected[prompt]}"
    return ""


def _by_rule(row: Mapping[str, Any]) -> float:
    """Return the reward of a step, or a sample, that the rule gave: a model's is rounded as everything is."""
    return float(row.get("reward_rule", row["reward"]))


def _difference(row: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    if _by_rule(row) != _by_rule(other):
        return f"reward {_by_rule(row)} instead of {_by_rule(other)}"
    for name in (one for one in COMPARED if one in other):
        if not math.isclose(row[name], other[name], rel_tol=ROUNDING, abs_tol=ROUNDING):
            return f"{name} {row[name]} instead of {other[name]}"
    return ""


def summary(plan: Plan) -> dict[str, Sequence[str]]:
    """Return a plan in a few words per task: its group, its replicas as TPxPP, what it keeps while it waits."""
    group_of = {name: number for number, group in enumerate(plan.groups) for name in group.tasks}
    return {
        name: (
            f"group {group_of[name]}",
            " ".join(f"{len(one.stages[0].devices)}x{len(one.stages)}" for one in task.replicas),
            task.idle_state,
        )
        for name, task in plan.tasks.items()
    }
