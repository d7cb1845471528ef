"""Why there is no plan: the tightest constraint, and the smallest change that would lift it."""

from __future__ import annotations

import math

from hetrl.cost.compute import StageShape
from hetrl.cost.memory import inference_active_bytes, training_active_bytes, training_state_bytes
from hetrl.cost.objective import Bound, bounds
from hetrl.cost.stages import model_of
from hetrl.errors import InfeasibleError
from hetrl.plan.plan import Plan
from hetrl.problem import Problem
from hetrl.search.space import Space, powers_of_two
from hetrl.workload import ACTOR_GENERATION, ACTOR_TRAINING, ENGINE_OF_TASK, TRAININGS, has_language_head


def refuse_impossible(space: Space) -> None:
    """Raise InfeasibleError for what no search can mend.

    That is a missing engine, slices of GPUs where whole ones are needed, sites that weights cannot reach, too little
    memory, too long sequences.
    """
    for task in space.problem.workload.tasks:
        if not _kinds(space, task):
            raise InfeasibleError(f"{task} needs {_missing(space, ENGINE_OF_TASK[task])}")
    _refuse_unreachable(space)
    for task in space.problem.workload.tasks:
        _refuse_too_little_memory(space, task)
        _refuse_too_long_sequences(space, task)


def _missing(space: Space, engine: str) -> str:
    """Return what no site has for a task of an engine, and the remedy."""
    sites = space.problem.topology.sites
    able = [site for site in sites if engine in site.engines]
    if not able:
        names = ", ".join(site.name for site in sites)
        return f"the engine {engine}, which no site has ({names}); install it at one and list it under `engines`"
    slices = ", ".join(f"{site.name}: {gpu}" for site in able for gpu in dict.fromkeys(n.gpu for n in site.nodes))
    return (
        f"whole GPUs: slices (MIG) work alone, and where {engine} is there are no others ({slices}); add nodes with "
        f"whole GPUs, or install {engine} where they are and list it under `engines`"
    )


def _refuse_unreachable(space: Space) -> None:
    """Refuse sites of which none that generates has a link to one that trains."""
    trains, generates = (
        list(dict.fromkeys(space.classes[kind].site for kind in _kinds(space, task)))
        for task in (ACTOR_TRAINING, ACTOR_GENERATION)
    )
    if not any(space.problem.topology.linked(one, other) for one in trains for other in generates):
        raise InfeasibleError(
            f"{ACTOR_GENERATION} can be at {', '.join(generates)}, which no link joins with {', '.join(trains)}, where "
            f"{ACTOR_TRAINING} can be: weights cannot cross; write a file of links and name it under topology.links"
        )


def _kinds(space: Space, task: str) -> list[int]:
    return [kind for kind in range(len(space.classes)) if space.usable(task, kind)]


def least_gb(space: Space, task: str) -> float:
    """Return the least memory over all devices together: weights, and for training gradients and sharded optimiser.

    Offloaded or not, the weights, gradients and optimiser of a task are on the devices at once while it runs.
    """
    workload, whole = space.problem.workload, _whole(space, task)
    if task in TRAININGS:
        return sum(training_state_bytes(whole, 1, workload.gradient_dtype)) / 1e9
    return whole.parameters * workload.weight_bytes / 1e9


def _whole(space: Space, task: str) -> StageShape:
    """Return the task's model as one stage on one device; only its bytes are asked for, which no GPU type changes."""
    workload, rates = space.problem.workload, space.problem.efficiencies.rates(space.classes[0].gpu)
    model = model_of(task, workload)
    return StageShape(model, model.layers, True, True, has_language_head(task), 1, rates, workload.weight_bytes)


def _usable_gb(space: Space, kinds: list[int]) -> float:
    return sum(space.sizes[kind] * _gpu_gb(space, space.classes[kind].gpu) for kind in kinds)


def _gpu_gb(space: Space, gpu: str) -> float:
    return space.problem.efficiencies.rates(gpu).usable_gb


def _room_gb(space: Space, task: str, kinds: list[int]) -> float:
    """Return the most memory that a task's weights may lie in together, on devices of these classes."""
    if task in TRAININGS:
        return _usable_gb(space, kinds)
    alone = [space.joined(kind) * _gpu_gb(space, space.classes[kind].gpu) for kind in kinds]
    if task == ACTOR_GENERATION:  # a server lies in one node
        return max(alone)
    whole = [kind for kind in kinds if not space.sliced(kind)]
    sites = {space.classes[kind].site for kind in whole}  # a replica lies in one site
    return max(*alone, *(_usable_gb(space, [k for k in whole if space.classes[k].site == site]) for site in sites), 0.0)


def _refuse_too_little_memory(space: Space, task: str) -> None:
    kinds = _kinds(space, task)
    needed, usable = least_gb(space, task), _room_gb(space, task, kinds)
    if needed <= usable:
        return
    phase, where, to = "training", "over all GPUs, the topology has", ""
    if task not in TRAININGS:
        place, to = ("node", " to it") if task == ACTOR_GENERATION else ("site", "")
        phase, where = "weights", f"in one {place}, the largest has"
    whole = [kind for kind in kinds if not space.sliced(kind)]
    remedy = "slices (MIG) work alone: add whole GPUs"
    if whole:
        best = max((space.classes[kind].gpu for kind in whole), key=lambda gpu: (_gpu_gb(space, gpu), gpu))
        missing = math.ceil((needed - _room_gb(space, task, whole)) / _gpu_gb(space, best))
        remedy = f"add {missing} x {best} ({_gpu_gb(space, best):.0f} GB usable each){to}"
    raise InfeasibleError(
        f"{task}: {model_of(task, space.problem.workload).name} {phase} needs {needed:.0f} GB {where} {usable:.0f} GB "
        f"usable; {remedy} or choose a smaller model"
    )


def _refuse_too_long_sequences(space: Space, task: str) -> None:
    """Refuse sequences of which not one fits, however the model is cut."""
    tokens = space.problem.workload.max_sequence_tokens
    needs = {kind: _sequence_gb(space, task, kind) for kind in _kinds(space, task)}
    kind = min(needs, key=lambda kind: needs[kind] / _gpu_gb(space, space.classes[kind].gpu))
    own, usable = space.classes[kind], _gpu_gb(space, space.classes[kind].gpu)
    if needs[kind] > usable:
        what = "keys and values" if task == ACTOR_GENERATION else "activations"
        raise InfeasibleError(
            f"{task}: one sequence of {tokens:,} tokens has {needs[kind]:,.0f} GB of {what} on each of "
            f"{space.joined(kind)} x {own.gpu}, which have {usable:.0f} GB usable; shorten batch.prompt_tokens or "
            "batch.response_tokens"
        )


def _sequence_gb(space: Space, task: str, kind: int) -> float:
    """Return the least that one sequence needs on each GPU of a node of this class, or on a slice.

    Generation: its keys and values, shared out over the node. Else one layer's activations, or for the backward pass
    its input, on the largest tensor-parallel degree.
    """
    workload, ranks = space.problem.workload, space.joined(kind)
    model, tokens = model_of(task, workload), float(workload.max_sequence_tokens)
    rates = space.problem.efficiencies.rates(space.classes[kind].gpu)
    if task == ACTOR_GENERATION:
        return tokens * _whole(space, task).kv_bytes_per_token / ranks / 1e9
    widest = max(n for n in powers_of_two(ranks) if model.heads % n == 0 and model.kv_heads % n == 0)
    layer = StageShape(model, 1, False, False, False, widest, rates, workload.weight_bytes)
    if task in TRAININGS:
        return training_active_bytes(layer, 1, tokens, "full") / 1e9
    return inference_active_bytes(layer, tokens) / 1e9


FEW = 20_000  # evaluations: fewer say nothing of whether there is a plan


def explain_infeasible(space: Space, searched: str, raised: str, compared: int | None = None) -> InfeasibleError:
    """Return the error of a search that found nothing although each task alone would fit.

    `searched` says how far it went ("within 5 s"), `raised` the setting that lets it go on, `compared` how many plans
    it valued, where that may be too few.
    """
    if compared is not None and compared < FEW:
        return InfeasibleError(
            f"no plan found {searched}; {compared:,} were compared, too few to say that there is none: raise {raised}"
        )
    task = max(space.problem.workload.tasks, key=lambda name: least_gb(space, name))
    needed = least_gb(space, task)
    kinds = _kinds(space, task)
    usable = _usable_gb(space, kinds)
    resident = sum(least_gb(space, name) for name in space.problem.workload.tasks)
    best = max((space.classes[kind].gpu for kind in kinds), key=lambda gpu: (_gpu_gb(space, gpu), gpu))
    missing = max(math.ceil((needed * 1.3 - usable) / _gpu_gb(space, best)), 1)  # and some room for activations
    trainer = ACTOR_TRAINING if task not in TRAININGS else task
    return InfeasibleError(
        f"no plan found {searched}: {task} alone needs {needed:.0f} GB of {usable:.0f} GB usable "
        f"before activations, all tasks together {resident:.0f} GB; add {missing} x {best}, shorten the sequences "
        f"(activations of {trainer}), raise {raised}, or link the sites that have no link"
    )


class BrokenBoundsError(InfeasibleError):
    """Every plan of a search breaks a bound of the objective; `nearest`, with its prediction, does so least."""

    def __init__(self, message: str, nearest: Plan) -> None:
        """Keep the plan beside the message."""
        super().__init__(message)
        self.nearest = nearest


def explain_broken_bounds(nearest: Plan, problem: Problem) -> BrokenBoundsError:
    """Return the error of a search in which every plan breaks a bound of the objective; `nearest` does so least."""
    broken = [bound for bound in bounds(nearest, problem.topology, problem.objective) if bound.excess > 0]
    broken.sort(key=lambda bound: -bound.excess)
    found = " and ".join(one.spoken(f"{_enough(one):g}") for one in broken)
    changed = " and ".join(f"{'lower' if one.least else 'raise'} {one.key} to {_as_written(one)}" for one in broken)
    return BrokenBoundsError(
        f"no plan found keeps {broken[0].key}: the nearest one {found}; {changed}, add GPUs, or search longer "
        "(planner.budget_seconds)",
        nearest,
    )


def _enough(bound: Bound) -> float:
    """Return a limit with three significant digits that what was found keeps."""
    step = 10.0 ** (math.floor(math.log10(bound.found)) - 2)
    rounded = math.floor if bound.least else math.ceil
    return rounded(bound.found / step) * step


def _as_written(bound: Bound) -> str:
    """Return `_enough` as the experiment file has it: times of section `launch` as HH:MM:SS."""
    if not bound.key.startswith("launch."):
        return f"{_enough(bound):g}"
    minutes, seconds = divmod(math.ceil(_enough(bound)), 60)
    return f"{minutes // 60:02d}:{minutes % 60:02d}:{seconds:02d}"
