"""What a process knows of the plan, in the time of its run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hetrl.describe.launching import Emulation
from hetrl.runtime.run.context import Context
from hetrl.runtime.wire.members import World
from hetrl.workload import ACTOR_TRAINING, WEIGHT_SYNC
from lab.quick import quick_plan
from tests.launch.launch_cases import quick_experiment, quick_gpus


def test_the_versions_of_a_world_go_with_it(tmp_path: Path) -> None:
    plan, world = quick_plan(), World(ACTOR_TRAINING, 0, 0, quick_plan().tasks[ACTOR_TRAINING])
    context = Context(tmp_path, "run", "alpha", "alpha", "", quick_gpus(plan), {}, quick_experiment(), plan)
    with pytest.raises(RuntimeError), context.versions_of(world) as directory:
        directory.mkdir()
        (directory / "version-3.safetensors").touch()
        raise RuntimeError("the run was aborted")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("launch", "times"), [({}, 1), ({"engines": "emulated", "emulation": Emulation(speed=0.02)}, 50)]
)
def test_a_plan_counts_on_longer_where_emulated_engines_are_slowed_down(
    tmp_path: Path, launch: dict[str, object], times: int
) -> None:
    """Else a version that takes as long as planned would count as late, and its replicas as behind."""
    plan, experiment = quick_plan(), quick_experiment()
    plan = replace(plan, predicted=replace(plan.predicted, tasks={WEIGHT_SYNC: 0.9}))
    experiment = experiment.model_copy(update={"launch": experiment.launch.model_copy(update=launch)})
    context = Context(tmp_path, "run", "alpha", "alpha", "", quick_gpus(plan), {}, experiment, plan)
    assert context.planned_seconds(WEIGHT_SYNC) == pytest.approx(0.9 * times)
