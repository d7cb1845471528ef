"""A small run over three sites, for looking at its launcher: a fixed plan, and scripts in place of the engines.

A gang (`launch.templates`) runs until a file `end` appears in its site's directory; at the lead site it plays the
controller then, and before that it has said GO.
"""

from __future__ import annotations

import sys
from pathlib import Path

from rich.console import Console

from hetrl.errors import HetrlError
from hetrl.plan.plan import (
    Algorithm,
    Group,
    Plan,
    Predicted,
    Replica,
    Route,
    Solver,
    Stage,
    TaskPlan,
    WeightSync,
)
from hetrl.problem import read_problem
from launch.life import Manner, begin
from launch.verbs.prepare import prepare

GANG = """\
#!/bin/bash
#SBATCH --job-name={{ key | quote }}
#SBATCH --chdir={{ directory | quote }}
#SBATCH --output={{ log | quote }}
{{ resources }}
say() {
  printf '{"time": %s, "source": "alpha", "sequence": %s, %s}\\n' "$(date +%s)" "$sequence" "$1" >>events.jsonl
  sequence=$((sequence + 1))
}
sequence=0
echo "tcp://$(hostname):7001" >gateway.endpoint
echo "up on $(hostname)" >>logs/gateway.log
if [ {{ site }} = alpha ]; then say '"kind": "go", "members": ["m"]'; fi
for ((i = 0; i < 3000; i++)); do
  if [ -e fail ]; then echo 'RuntimeError: told to fail' >>logs/gateway.log; exit 3; fi
  if [ -e end ]; then break; fi
  sleep 0.2
done
if [ {{ site }} = alpha ]; then say '"kind": "finished"'; fi
"""
ARRAY = """\
#!/bin/bash
#SBATCH --job-name={{ key | quote }}
#SBATCH --array=0-{{ last }}
#SBATCH --chdir={{ directory | quote }}
#SBATCH --output={{ log | quote }}
{{ resources }}
for ((i = 0; i < 3000; i++)); do if [ -e end ]; then exit; fi; sleep 0.2; done
"""


def quick_plan() -> Plan:
    """Two training ranks at alpha, one generation replica at beta and one at gamma."""
    layers = (0, 2)
    trainers, rollouts = ("alpha/alpha-0/0", "alpha/alpha-0/1"), ("beta/beta-0/0", "gamma/gamma-0/0")
    return Plan(
        algorithm=Algorithm("grpo", "sync", 0, 1),
        groups=(Group(("actor_training",), trainers), Group(("actor_generation",), rollouts, "array")),
        tasks={
            "actor_generation": TaskPlan(
                "vllm", tuple(Replica(8, (Stage((one,), layers),), 0.1, 8) for one in rollouts)
            ),
            "actor_training": TaskPlan("megatron", tuple(Replica(8, (Stage((one,), layers),)) for one in trainers)),
        },
        weight_sync=WeightSync("full", (Route("alpha", "beta"), Route("alpha", "gamma"))),
        site_order=("alpha", "beta", "gamma"),
        predicted=Predicted(1.0, 16.0),
        solver=Solver("verl", 0, 0.1, 1),
    )


def submit_slurm(config: Path, console: Console, detach: bool) -> int:
    prepared = prepare(read_problem(config), quick_plan(), config, "slurm", console)
    return begin(prepared, quick_plan(), console, Manner(yes=True, detach=detach))


def submit_here() -> None:
    """Submit the experiment of the working directory, and follow it."""
    try:
        sys.exit(submit_slurm(Path("config.yaml"), Console(), detach=False))
    except HetrlError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
