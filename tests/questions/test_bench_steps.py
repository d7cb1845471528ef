"""The bench `steps`: each published row as a plan that passes `check` and uses the row's GPUs."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest

from hetrl.workload import ACTOR_GENERATION, ACTOR_TRAINING


@pytest.fixture(scope="module")
def bench(bench_file: Callable[[str], ModuleType]) -> ModuleType:
    return bench_file("steps")


def test_each_row_is_the_plan_of_its_recipe(bench: ModuleType) -> None:
    for row in bench.ROWS:
        asked = bench.problem(row)
        made = bench.plan(row, asked)  # refuses what `check` refuses
        assert {device for group in made.groups for device in group.devices} == {d.id for d in asked.topology.devices}
        trained, served = made.tasks[ACTOR_TRAINING], made.tasks[ACTOR_GENERATION]
        assert (trained.tensor_parallel, trained.pipeline_parallel) == (row.tensor, row.pipeline)
        assert len(served.devices) == (row.servers or row.gpus)
        assert {replica.samples for replica in served.replicas} == {2048 * row.server_tensor // len(served.devices)}


def test_the_parts_of_a_step_in_which_all_take_turns_add_up(bench: ModuleType) -> None:
    row = bench.ROWS[0]
    asked = bench.problem(row)
    made = bench.plan(row, asked)
    assert sum(bench.parts(made, asked).values()) == pytest.approx(made.predicted.iteration_seconds)
