"""Seconds of one iteration of a plan: the tasks' own times, put together by groups and mode."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from hetrl.cost import cycle, formulas
from hetrl.cost.charges import held_by_site, price_per_hour
from hetrl.cost.generation import ReplicaSeconds, generation_cost
from hetrl.cost.memory import peak_memory_gb, task_footprints
from hetrl.cost.model import CostModel
from hetrl.cost.network import Direction, link_seconds
from hetrl.cost.training import Cost, beside, inference_cost, steps_seconds, training_cost
from hetrl.cost.weight_sync import (
    NO_TRAININGS,
    SyncCost,
    TrainingsAhead,
    Versions,
    trained_models,
    versions_of,
    weight_sync_cost,
)
from hetrl.plan.plan import Plan, Predicted, TaskPlan
from hetrl.workload import (
    ACTOR_GENERATION,
    ACTOR_TRAINING,
    CRITIC_INFERENCE,
    CRITIC_TRAINING,
    CRITIC_WEIGHT_SYNC,
    INFERENCES,
    OLD_LOGPROBS,
    TRAININGS,
    WEIGHT_SYNC,
    Workload,
    scores_beside_inferences,
)

# What a version of each trained model's weights is called among the tasks.
SYNCS = {"actor": WEIGHT_SYNC, "critic": CRITIC_WEIGHT_SYNC}
_NOBODY: Mapping[Direction, int] = {}


@dataclass(frozen=True)
class GroupTimes:
    """The seconds of one group in an iteration, what switches its tasks in and out included.

    Scoring the batch is one of the inferences where it is done beside them (`workload.scores_beside_inferences`).
    `rollouts` is there in the group that generates; with `refill` 0 where a stop does not empty the cache.
    """

    generation: float
    inferences: float
    trainings: float
    rollouts: ReplicaSeconds | None = None


def iteration_seconds(groups: Sequence[GroupTimes], versions: Versions, workload: Workload) -> float:
    """Return the time between two weight versions (`cycle.iteration_seconds`)."""
    own = max(range(len(groups)), key=lambda index: groups[index].generation)
    rollouts = groups[own].rollouts
    return cycle.iteration_seconds(
        groups[own].generation,
        [group.inferences for group in groups],
        [group.trainings for group in groups],
        own,
        rollouts or (),
        versions.actor,
        versions.transfer,
        versions.pause,
        versions.critic,
        versions.valuing,
        versions.links,
        workload.staleness if rollouts else 0,
    )


def task_cost(name: str, task: TaskPlan, model: CostModel, sharing: Mapping[Direction, int] = _NOBODY) -> Cost:
    """Return the seconds and the bytes between sites of one task in an iteration, undisturbed but for `sharing`."""
    if name == ACTOR_GENERATION:
        return generation_cost(task, model)
    if name in TRAININGS:
        return training_cost(name, task, model, sharing)
    return inference_cost(name, task, model)


def switch_seconds(name: str, task: TaskPlan, model: CostModel) -> float:
    """Return the time that an offloaded task spends on PCIe in an iteration: its state in and out again."""
    if task.idle_state != "offload":
        return 0.0
    needs = task_footprints(name, task, model)
    return max(2 * need.host_gb * 1e9 / model.rates(device).host_bytes_per_s for device, need in needs)


def link_sharing(plan: Plan, alone: Mapping[str, Cost]) -> dict[Direction, int]:
    """Count, per direction between sites, the groups whose trainings may use it at the same time."""
    users: Counter[Direction] = Counter()
    for group in plan.groups:
        users.update({direction for name in group.tasks for direction in alone[name].wan_bytes})
    return {direction: groups for direction, groups in users.items() if groups > 1}


def predict(plan: Plan, model: CostModel) -> Predicted:
    """Return what the cost model says of a plan.

    `tasks` has the seconds of each task and of each trained model's version (`SYNCS`), and `old_logprobs`, the part of
    the actor's training that scores the batch, where it does; `peak_memory_gb` those of each used device;
    `wan_gb_per_iteration` has a key `from-to` for each direction in which anything crosses between two sites (samples,
    a few bytes per token, are left out). A plan over a missing link takes infinite time.
    """
    price = price_per_hour(plan, model.topology)
    costs, syncs = task_costs(plan, model), sync_costs(plan, model)
    seconds, syncs = settled_seconds(plan, costs, syncs, model)
    wan = _wan_bytes(costs, syncs)
    return Predicted(
        iteration_seconds=seconds,
        samples_per_second=model.workload.samples / seconds,
        tasks={
            **{name: cost.seconds for name, cost in costs.items()},
            **{name: part for name, part in costs[ACTOR_TRAINING].parts.items() if name == OLD_LOGPROBS},
            **{SYNCS[name]: cost.seconds for name, cost in syncs.items()},
        },
        peak_memory_gb=peak_memory_gb(plan, model),
        wan_gb_per_iteration={f"{a}-{b}": moved / 1e9 for (a, b), moved in sorted(wan.items()) if moved > 0},
        gpu_hours_per_iteration=formulas.gpu_hours(sum(held_by_site(plan, model.topology).values()), 0.0, seconds),
        price_per_hour=price,
        cost_per_iteration=None if price is None else formulas.price_of(price, seconds),
    )


def task_costs(plan: Plan, model: CostModel) -> dict[str, Cost]:
    """Return the seconds and the bytes between sites of each task.

    Trainings that share a link begin together and slow each other down until the first has ended.
    """
    costs = {name: task_cost(name, task, model) for name, task in plan.tasks.items()}
    if sharing := link_sharing(plan, costs):
        slowed = {name: task_cost(name, plan.tasks[name], model, sharing) for name in costs if name in TRAININGS}
        first = min(steps_seconds(cost) for cost in slowed.values())
        for name, cost in slowed.items():
            costs[name] = beside(cost, costs[name], first)
    return costs


def sync_costs(plan: Plan, model: CostModel) -> dict[str, SyncCost]:
    """Return the seconds and the bytes of a version of each trained model."""
    trained = trained_models(plan.tasks)
    return {name: weight_sync_cost(plan.weight_sync, plan.tasks, model, name) for name in trained}


def plan_seconds(plan: Plan, costs: Mapping[str, Cost], syncs: Mapping[str, SyncCost], model: CostModel) -> float:
    """Return the time of an iteration of a plan whose tasks and, alone, weight versions cost this."""
    return settled_seconds(plan, costs, syncs, model)[0]


def settled_seconds(
    plan: Plan, costs: Mapping[str, Cost], syncs: Mapping[str, SyncCost], model: CostModel
) -> tuple[float, dict[str, SyncCost]]:
    """Return the time of an iteration, and what its weight versions cost, which cost `syncs` alone.

    In mode async they give way to the next batch's trainings on links, and have the more time before these the longer
    an iteration takes: of three that follow one another, `cycle.settled_seconds`.
    """
    members = [{name: plan.tasks[name] for name in group.tasks} for group in plan.groups]
    groups = _groups_times(members, costs, model)
    links = _busiest_link(costs, syncs, model)
    trained = _trained(plan, members, groups, costs, model)

    def seconds(ahead: TrainingsAhead) -> float:
        return iteration_seconds(groups, versions_of(trained, syncs, ahead, links, model), model.workload)

    def following(period: float) -> TrainingsAhead:
        return _trainings_ahead(period, trained.actor, members, groups, costs, model)

    ahead, first = NO_TRAININGS, seconds(NO_TRAININGS)
    if model.workload.staleness and math.isfinite(first) and (ahead := following(first)).taken:
        second = found = seconds(ahead)
        if second > first and math.isfinite(second):
            found = cycle.settled_seconds(first, second, seconds(following(second)))
        first, ahead = found, following(found)
    return first, {name: ahead.give_way(sync) for name, sync in syncs.items()}


def _trained(
    plan: Plan,
    members: Sequence[Mapping[str, TaskPlan]],
    groups: Sequence[GroupTimes],
    costs: Mapping[str, Cost],
    model: CostModel,
) -> Versions:
    """Return until when actor and critic are trained, the actor first where their group does both; nothing is sent."""
    actor = costs[ACTOR_TRAINING].seconds + switch_seconds(ACTOR_TRAINING, plan.tasks[ACTOR_TRAINING], model)
    actor -= sum(_scoring_beside(own, costs, model.workload) for own in members)
    critic = max(
        (times.trainings for own, times in zip(members, groups, strict=True) if CRITIC_TRAINING in own), default=0.0
    )
    return Versions(actor, critic=critic, valuing=_valuing_seconds(plan, members, costs, model))


def _valuing_seconds(
    plan: Plan, members: Sequence[Mapping[str, TaskPlan]], costs: Mapping[str, Cost], model: CostModel
) -> float:
    """Return the time of the critic's inference with the scoring behind it; 0 without a critic."""
    if CRITIC_INFERENCE not in plan.tasks:
        return 0.0
    valuing = costs[CRITIC_INFERENCE].seconds
    valuing += switch_seconds(CRITIC_INFERENCE, plan.tasks[CRITIC_INFERENCE], model)
    return valuing + sum(_scoring_beside(own, costs, model.workload) for own in members if CRITIC_INFERENCE in own)


def _trainings_ahead(
    period: float,
    trained: float,
    members: Sequence[Mapping[str, TaskPlan]],
    groups: Sequence[GroupTimes],
    costs: Mapping[str, Cost],
    model: CostModel,
) -> TrainingsAhead:
    """Return what the next batch's trainings send, from when a version starts: once the actor is `trained` (`cycle`).

    Its inferences begin a period after this batch's, but behind this batch's training where their group does both; its
    scoring is the last of them, where it is one, and its steps come a period after this batch's.
    """
    inference, training = max(group.inferences for group in groups), max(group.trainings for group in groups)
    own = next(index for index, tasks in enumerate(members) if ACTOR_TRAINING in tasks)
    scoring = _scoring_beside(members[own], costs, model.workload)
    begins = max(period + groups[own].inferences - scoring - inference - trained, 0.0)
    taken: dict[Direction, tuple[float, float]] = {}
    for cost in (costs[name] for name in TRAININGS if name in costs):
        for way, load in cost.wan_bytes.items():
            scored = cost.scored_bytes.get(way, 0.0) if scoring else 0.0
            ahead, steps = taken.get(way, (0.0, 0.0))
            first, rest = (link_seconds(model.topology, way, moved) for moved in (scored, load - scored))
            taken[way] = (ahead + first, steps + rest)
    return TrainingsAhead((begins, max(period - trained, begins + scoring)), (scoring, training), taken)


def _busiest_link(costs: Mapping[str, Cost], syncs: Mapping[str, SyncCost], model: CostModel) -> float:
    """Return the time of all that crosses the busiest link; 0 where it does so one after the other."""
    if not model.workload.staleness and "critic" not in syncs:
        return 0.0
    load = _wan_bytes(costs, syncs)
    return max((link_seconds(model.topology, direction, moved) for direction, moved in load.items()), default=0.0)


def _wan_bytes(costs: Mapping[str, Cost], syncs: Mapping[str, SyncCost]) -> dict[Direction, float]:
    wan: defaultdict[Direction, float] = defaultdict(float)
    moved = [*(cost.wan_bytes for cost in costs.values()), *(cost.wan_bytes for cost in syncs.values())]
    for loads in moved:
        for direction, load in loads.items():
            wan[direction] += load
    return dict(wan)


def _groups_times(
    members: Sequence[Mapping[str, TaskPlan]], costs: Mapping[str, Cost], model: CostModel
) -> list[GroupTimes]:
    """Return the seconds of each group.

    A critic whose rewards wait for the actor's trainer to score the batch does so on devices of its own, where that is
    none of the inferences.
    """
    groups, workload = [group_times(tasks, costs, model) for tasks in members], model.workload
    for index, tasks in enumerate(members):
        if CRITIC_TRAINING in tasks and ACTOR_TRAINING not in tasks and workload.kl_in_reward:
            beside = sum(_scoring_beside(own, costs, workload) for own in members)
            waits = costs[ACTOR_TRAINING].parts[OLD_LOGPROBS] - beside
            groups[index] = replace(groups[index], trainings=groups[index].trainings + waits)
    return groups


def group_times(tasks: Mapping[str, TaskPlan], costs: Mapping[str, Cost], model: CostModel) -> GroupTimes:
    """Return the seconds of the group of these tasks, from the costs of each."""
    seconds = {name: costs[name].seconds + switch_seconds(name, tasks[name], model) for name in tasks}
    inferences, trainings = (sum(seconds[n] for n in tasks if n in kind) for kind in (INFERENCES, TRAININGS))
    scoring = _scoring_beside(tasks, costs, model.workload)
    inferences, trainings = inferences + scoring, trainings - scoring
    if ACTOR_GENERATION not in tasks:
        return GroupTimes(0.0, inferences, trainings)
    rollouts = ReplicaSeconds(**costs[ACTOR_GENERATION].parts)
    if tasks[ACTOR_GENERATION].idle_state == "resident":
        rollouts = rollouts._replace(refill=0.0)
    return GroupTimes(seconds[ACTOR_GENERATION], inferences, trainings, rollouts)


def _scoring_beside(tasks: Collection[str], costs: Mapping[str, Cost], workload: Workload) -> float:
    """Return the seconds in which the group of these tasks scores the batch, behind its inferences."""
    beside = scores_beside_inferences(workload.scores_batch, workload.staleness, tasks)
    return costs[ACTOR_TRAINING].parts[OLD_LOGPROBS] if ACTOR_TRAINING in tasks and beside else 0.0


def with_prediction(plan: Plan, model: CostModel) -> Plan:
    """Return the plan with `predicted` filled."""
    return replace(plan, predicted=predict(plan, model))
