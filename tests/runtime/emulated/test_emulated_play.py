"""What an emulated engine waits for is what the cost model says of the batch that it is given."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from hetrl.cost.iteration import task_costs
from hetrl.cost.training import training_cost
from hetrl.cost.weight_sync import critic_behind, weight_sync_cost
from hetrl.errors import HetrlError
from hetrl.plan.plan import Stage
from hetrl.runtime.emulated import play
from hetrl.runtime.emulated.costs import COSTS, read_costs, write_costs
from tests.plan.plan_cases import FIRST
from tests.runtime.emulated.emulated_cases import MODEL, PLAN, with_critic

TRAINING = PLAN.tasks["actor_training"]
LENGTHS = [768] * 64  # prompt and response of the workload


def test_the_cost_model_of_a_site_is_that_of_the_launcher(tmp_path: Path) -> None:
    write_costs(tmp_path, MODEL)
    found = read_costs(tmp_path)
    assert (found.topology, found.workload, found.efficiencies) == (MODEL.topology, MODEL.workload, MODEL.efficiencies)
    assert task_costs(PLAN, found) == task_costs(PLAN, MODEL)


def test_a_site_without_a_cost_model_says_so(tmp_path: Path) -> None:
    with pytest.raises(HetrlError, match=f"{COSTS}: No such file"):
        read_costs(tmp_path)
    (tmp_path / COSTS).write_text('{"topology": 3}')
    with pytest.raises(HetrlError, match="not a cost model"):
        read_costs(tmp_path)


def test_the_steps_and_the_scores_of_a_batch_take_what_its_training_was_predicted_to_take() -> None:
    """Four steps of a quarter each and one pass ahead of them, as `minibatches` 4 makes of a batch."""
    quarters = [play.optimizer_step("actor_training", TRAINING, LENGTHS[:16], MODEL).seconds for _ in range(4)]
    scored = play.scores("actor_training", TRAINING, LENGTHS, MODEL).seconds
    predicted = training_cost("actor_training", TRAINING, MODEL, {}).seconds
    assert sum(quarters) + scored == pytest.approx(predicted, rel=0.05)


def test_longer_sequences_take_longer() -> None:
    short = play.scores("reward_inference", PLAN.tasks["reward_inference"], [300] * 8, MODEL)
    long = play.scores("reward_inference", PLAN.tasks["reward_inference"], [3000] * 8, MODEL)
    assert long.seconds > 1.2 * short.seconds


def test_a_training_over_a_link_says_what_crosses_it() -> None:
    inside = play.optimizer_step("actor_training", TRAINING, LENGTHS[:16], MODEL)
    assert inside.carried == {}
    assert inside.micro_batches == math.ceil(16 * (40 / 64) / 2), "the larger share, two by two"
    (one,) = TRAINING.replicas[:1]
    stages = (Stage(FIRST, (0, 14)), Stage(("jsc/l40s-0/0", "jsc/l40s-0/1"), (14, 28)))
    across = replace(TRAINING, replicas=(replace(one, samples=64, stages=stages),))
    crossed = play.optimizer_step("actor_training", across, LENGTHS[:16], MODEL).carried
    assert set(crossed) == {("alps", "jsc"), ("jsc", "alps")}
    assert min(crossed.values()) == 16 * 768 * 2048 * 2, "activations in bf16, once each way"


def test_only_what_is_offloaded_takes_the_way_over_pcie() -> None:
    assert play.switch_seconds("actor_training", TRAINING, MODEL) == 0.0
    assert play.switch_seconds("actor_training", replace(TRAINING, idle_state="offload"), MODEL) > 0.1


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_version_of_the_critic_gives_way_in_mode_sync_on_a_link_that_both_take(mode: str) -> None:
    plan, model = with_critic(mode)
    costs = {name: weight_sync_cost(plan.weight_sync, plan.tasks, model, name) for name in ("actor", "critic")}
    behind = critic_behind(costs, model.topology).transfer_seconds
    assert behind > 1.5 * costs["critic"].transfer_seconds
    sharing = 2 * costs["critic"].transfer_seconds
    actor, critic = play.versions(plan, [("actor", 0.0), ("critic", 0.0)], model)
    assert critic == pytest.approx(behind if mode == "sync" else sharing, rel=0.1)
    assert actor == pytest.approx(costs["actor"].transfer_seconds, rel=0.1)
