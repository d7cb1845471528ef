"""What a process knows of the plan, in the time of its run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hetrl.describe.launching import Emulation
from hetrl.runtime.run.context import Context
from hetrl.workload import WEIGHT_SYNC
from lab.quick import quick_plan
from tests.launch.launch_cases import quick_experiment, quick_gpus


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
