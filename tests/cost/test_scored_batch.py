"""The forward pass of the actor's trainer ahead of its optimiser steps: when it is counted, and for how much."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hetrl.cost.iteration import group_times
from hetrl.cost.model import CostModel
from hetrl.cost.training import Cost, inference_cost, training_cost
from hetrl.plan.plan import Replica, Stage, TaskPlan
from hetrl.workload import ACTOR_GENERATION, ACTOR_TRAINING, OLD_LOGPROBS, REFERENCE_INFERENCE, needs_old_logprobs
from tests.plan.plan_cases import plan, topology, workload

ACROSS = (Stage(("alps/a100-0/0",), (0, 20)), Stage(("jsc/l40s-0/0",), (20, 28)))
BESIDE = (Stage(("alps/a100-1/0",), (0, 20)), Stage(("jsc/l40s-1/0",), (20, 28)))
BACK = (Stage(("jsc/l40s-0/1",), (0, 20)), Stage(("alps/a100-0/1",), (20, 28)))


def costs(task: TaskPlan, name: str = ACTOR_TRAINING) -> tuple[Cost, Cost]:
    """Return what a training costs whose batch is scored first, and what the same steps cost without."""
    job = workload()
    assert job.scores_batch
    models = (CostModel(topology(), one) for one in (job, replace(job, ratio_to_sampler=True)))
    scored, plain = (training_cost(name, task, model, {}) for model in models)
    return scored, plain


@pytest.mark.parametrize(
    ("steps", "kl_in_reward", "ratio_to_sampler", "needed"),
    [
        (1, False, False, False),  # the log-probs of the only step are those of its start
        (2, False, False, True),
        (2, False, True, False),
        (1, True, False, True),  # a penalty comes before the advantages, and these before the step
        (2, True, True, True),
    ],
)
def test_a_batch_is_scored_where_its_log_probs_are_needed_ahead_of_a_step(
    steps: int, kl_in_reward: bool, ratio_to_sampler: bool, needed: bool
) -> None:
    assert needs_old_logprobs(steps, kl_in_reward, ratio_to_sampler) == needed
    changes = {"kl_in_reward": kl_in_reward, "ratio_to_sampler": ratio_to_sampler}
    assert replace(workload(), optimizer_steps_per_iteration=steps, **changes).scores_batch == needed


def test_inside_a_site_the_pass_takes_what_an_inference_on_the_same_devices_does() -> None:
    task = plan().tasks[ACTOR_TRAINING]
    scored, plain = costs(task)
    alone = inference_cost(REFERENCE_INFERENCE, task, CostModel(topology(), workload()))
    assert alone.seconds > 0
    assert scored.parts == pytest.approx({**plain.parts, OLD_LOGPROBS: alone.seconds})
    assert scored.seconds == pytest.approx(plain.seconds + alone.seconds)
    assert scored.wan_bytes == plain.wan_bytes


def test_the_critic_is_not_scored() -> None:
    job = replace(workload(), critic=workload().actor)
    task = plan().tasks[ACTOR_TRAINING]
    assert OLD_LOGPROBS not in training_cost("critic_training", task, CostModel(topology(), job), {}).parts


def test_between_sites_the_activations_of_the_pass_go_one_way() -> None:
    scored, plain = costs(TaskPlan("megatron", (Replica(64, ACROSS),), micro_batch=2))
    once = 64 * (256 + 512) * workload().actor.hidden * 2
    more = {direction: scored.wan_bytes[direction] - load for direction, load in plain.wan_bytes.items()}
    assert more == pytest.approx({("alps", "jsc"): once, ("jsc", "alps"): 0.0})
    assert plain.wan_bytes["alps", "jsc"] == pytest.approx(once)  # each sample is in one of the steps


def test_over_a_slow_link_the_pass_takes_what_the_link_needs_and_flows_in_one_direction_share_it() -> None:
    slow = topology()
    links = tuple(replace(link, gbps=0.01) if set(link.between) == {"alps", "jsc"} else link for link in slow.links)
    model = CostModel(replace(slow, links=links), workload())
    alone, against, both = (
        training_cost(ACTOR_TRAINING, TaskPlan("megatron", replicas, micro_batch=2), model, {}).parts[OLD_LOGPROBS]
        for replicas in (
            (Replica(32, ACROSS),),
            (Replica(32, ACROSS), Replica(32, BACK)),
            (Replica(32, ACROSS), Replica(32, BESIDE)),
        )
    )
    wire = 32 * (256 + 512) * workload().actor.hidden * 2 * 8 / 0.01e9
    assert alone == pytest.approx(wire, rel=0.05)
    assert against == pytest.approx(wire, rel=0.05)
    assert both == pytest.approx(2 * wire, rel=0.05)


@pytest.mark.parametrize(
    ("mode", "generates", "inferences"), [("sync", True, 5.0), ("async", True, 0.0), ("async", False, 5.0)]
)
def test_a_batch_is_scored_beside_the_inferences_unless_generation_would_stand_still(
    mode: str, generates: bool, inferences: float
) -> None:
    model = CostModel(topology(), replace(workload(), mode=mode, max_staleness=1))
    names = (ACTOR_GENERATION, ACTOR_TRAINING) if generates else (ACTOR_TRAINING,)
    rollouts = {"whole": 1.0, "busy": 1.0, "alone": 1.0, "shared": 1.0, "queued": 0.0, "refill": 0.0}
    found = {
        ACTOR_GENERATION: Cost(10.0, {}, rollouts),
        ACTOR_TRAINING: Cost(30.0, {}, {OLD_LOGPROBS: 5.0, "pipeline": 25.0}),
    }
    times = group_times({name: replace(plan().tasks[name], idle_state="resident") for name in names}, found, model)
    assert (times.inferences, times.trainings) == (inferences, 30.0 - inferences)
