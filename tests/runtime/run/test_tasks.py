"""The controller's tasks are those of the plan, and what they ask for is what it and the experiment say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from hetrl.runtime.run.context import Context
from hetrl.runtime.run.tasks import tasks_of
from hetrl.runtime.transport.member import Member
from lab.quick import quick_plan
from tests.launch.launch_cases import quick_experiment, quick_gpus


@pytest.mark.parametrize(
    ("mode", "gives_way"), [({"mode": "sync"}, True), ({"mode": "async", "max_staleness": 2}, False)]
)
def test_the_critics_versions_give_way_to_the_actors_where_generation_waits_for_those(
    tmp_path: Path, mode: dict[str, Any], gives_way: bool
) -> None:
    plan = quick_plan()
    training = plan.tasks["actor_training"]
    plan = replace(plan, tasks={**plan.tasks, "critic_training": training, "critic_inference": training})
    experiment = quick_experiment(algorithm=mode)
    context = Context(tmp_path, "run", "alpha", "alpha", "", quick_gpus(plan), {}, experiment, plan)
    tasks = tasks_of(context, cast(Member, None))
    assert tasks.critic is not None
    assert (tasks.actor.gives_way, tasks.critic.gives_way) == (False, gives_way)
    assert tasks.critic.receivers == context.addresses("critic_inference")
