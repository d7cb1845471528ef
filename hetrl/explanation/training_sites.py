"""Why training stays in one site: its best grid with all GPUs of one site, and with all GPUs of two.

    for every site, and every two linked sites of which one trains in the plan:
        grids = tensor x pipeline parallel x micro-batch, with and without the slower GPU types of a site;
                two sites share the replicas, or the stages of each replica
        layers and samples in proportion to the speed of the GPUs that take them
        the least predicted seconds of those that fit into memory, and of the plan's own grid where it is at these sites

Nothing else of the plan takes any GPU here, so their difference is what the link costs or the further GPUs bring.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import permutations, product

from hetrl.cost.iteration import task_cost
from hetrl.cost.memory import task_footprints
from hetrl.cost.model import CostModel
from hetrl.explanation.resources import Part, derivatives, resources
from hetrl.hardware import Device, Site
from hetrl.plan.plan import RECOMPUTES, Plan, Replica, Stage, TaskPlan, site_of, sites_of
from hetrl.search.balance import balance
from hetrl.search.core.tables import MAX_STAGES
from hetrl.search.space import powers_of_two
from hetrl.workload import ACTOR_TRAINING, ENGINE_OF_TASK

MICRO_BATCHES = (1, 4)
_ENGINE = ENGINE_OF_TASK[ACTOR_TRAINING]
Block = tuple[Device, ...]  # the tensor-parallel ranks of one stage, in one node


@dataclass(frozen=True)
class Spread:
    """Training on all GPUs of some sites, as fast as it can: its grid, TP x PP x DP, and what it waits for."""

    sites: tuple[str, ...]
    seconds: float
    parallelism: str
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class TrainingSites:
    """Where the plan trains, and what training would take at best in one site and in two.

    None: it does not fit, or of two, `why_not_two` says why there are none.
    """

    sites: tuple[str, ...]
    seconds: float
    one: Spread | None
    two: Spread | None
    why_not_two: str = ""


def training_sites(plan: Plan, model: CostModel) -> TrainingSites | None:
    """Return the comparison for the actor's training; None where the topology has one site."""
    if len(model.topology.sites) < 2:
        return None
    task = plan.tasks[ACTOR_TRAINING]
    here = tuple(sites_of(task.devices))
    able = [site for site in model.topology.whole_gpus.sites if _ENGINE in site.engines]
    pairs = [
        (site, other)
        for site in able
        for other in able
        if site.name in here and site != other and model.topology.linked(site.name, other.name)
    ]
    return TrainingSites(
        sites=here,
        seconds=task_cost(ACTOR_TRAINING, task, model).seconds,
        one=_best([(site,) for site in able], plan, model),
        two=_best(pairs, plan, model),
        why_not_two="" if pairs else _no_pair(here, able),
    )


def _no_pair(here: Sequence[str], able: Sequence[Site]) -> str:
    """Return why no two linked sites, of which training is at one, could do it together."""
    others = [site.name for site in able if site.name not in here]
    if not others:
        return f"no other site has whole GPUs and the engine {_ENGINE}"
    return f"no link joins {', '.join(here)} with {', '.join(others)}, where training could be, too"


def _best(sets: Sequence[tuple[Site, ...]], plan: Plan, model: CostModel) -> Spread | None:
    own = plan.tasks[ACTOR_TRAINING]
    asked = [(sites, task) for sites in sets for task in _grids(sites, own, model)]
    here = {site_of(device) for device in own.devices}
    asked += [(sites, own) for sites in sets if {site.name for site in sites} == here]
    found = [(task_cost(ACTOR_TRAINING, task, model).seconds, sites, task) for sites, task in asked]
    if not found:
        return None
    seconds, sites, task = min(found, key=lambda entry: entry[0])
    names = tuple(site.name for site in sites)
    loads = {f"{a}-{b}": 1.0 for a, b in permutations(names, 2)}
    alone = replace(plan, tasks={ACTOR_TRAINING: task}, predicted=replace(plan.predicted, wan_gb_per_iteration=loads))

    def times(other: CostModel) -> dict[str, float]:
        return {ACTOR_TRAINING: task_cost(ACTOR_TRAINING, task, other).seconds}

    parts = derivatives(resources(alone, model.topology), model, times)[ACTOR_TRAINING]
    return Spread(names, seconds, f"{task.tensor_parallel}×{task.pipeline_parallel}×{len(task.replicas)}", parts)


def _grids(sites: tuple[Site, ...], like: TaskPlan, model: CostModel) -> Iterator[TaskPlan]:
    """Yield training tasks on GPUs of all the sites that fit into memory, with the settings of another."""
    actor = model.workload.actor
    widest = max(node.gpus for site in sites for node in site.nodes)
    for tensor in powers_of_two(widest):
        if actor.heads % tensor or actor.kv_heads % tensor:
            continue
        for blocks in product(*(_block_sets(site, tensor, model) for site in sites)):
            for stages in powers_of_two(min(MAX_STAGES, actor.layers)):
                for chains in _chains(blocks, stages):
                    if len({block[0].site for chain in chains for block in chain}) == len(sites):
                        yield from _sized(chains, like, model)


def _sized(chains: Sequence[tuple[Block, ...]], like: TaskPlan, model: CostModel) -> Iterator[TaskPlan]:
    """Yield the task for each micro-batch, recomputed only as far as it does not fit otherwise."""
    for micro_batch in MICRO_BATCHES:
        for recompute in RECOMPUTES:
            changed = replace(like, micro_batch=micro_batch, recompute=recompute, idle_state="resident")
            task = _task(chains, changed, model)
            if task is not None and _fits(task, model):
                yield task
                break


def _fits(task: TaskPlan, model: CostModel) -> bool:
    needs = task_footprints(ACTOR_TRAINING, task, model)
    return all(need.total_gb <= model.rates(device).usable_gb for device, need in needs)


def _block_sets(site: Site, tensor: int, model: CostModel) -> Iterator[list[Block]]:
    """Yield the blocks of a site, the fastest first: all of them, then without the slowest type, and so on."""
    blocks = []
    for node in site.nodes:
        devices = [model.topology.device_by_id[f"{site.name}/{node.name}/{index}"] for index in range(node.gpus)]
        blocks += [tuple(devices[at : at + tensor]) for at in range(0, node.gpus - tensor + 1, tensor)]
    speed = partial(_speed, model)
    blocks.sort(key=speed, reverse=True)
    for slowest in sorted(set(map(speed, blocks))):
        yield [block for block in blocks if speed(block) >= slowest]


def _chains(blocks: Sequence[Sequence[Block]], stages: int) -> Iterator[list[tuple[Block, ...]]]:
    """Yield sets of replicas of so many stages.

    Replicas in one site each, of blocks that follow each other; replicas whose stage i is of the i-th part of all
    blocks, those of one site first; replicas with half of their stages in either site.
    """
    whole = [_cut(some, stages) for some in blocks]
    if all(whole):
        yield [chain for some in whole for chain in some]
    every = [block for some in blocks for block in some]
    if stages > 1 and (count := len(every) // stages):
        yield [tuple(every[index::count][:stages]) for index in range(count)]
    if stages > 1 and len(blocks) == 2:
        halves = [_cut(some, stages // 2) for some in blocks]
        if all(halves):
            yield [(*first, *second) for first, second in zip(*halves, strict=False)]


def _cut(blocks: Sequence[Block], length: int) -> list[tuple[Block, ...]]:
    return [tuple(blocks[at : at + length]) for at in range(0, len(blocks) - length + 1, length)]


def _task(chains: Sequence[tuple[Block, ...]], like: TaskPlan, model: CostModel) -> TaskPlan | None:
    """Return the task; None where there are more replicas than micro-batches."""
    units, rest = divmod(model.workload.samples, like.micro_batch)
    if rest or units < len(chains):
        return None
    speeds = [[_speed(model, block) for block in chain] for chain in chains]
    columns = [min(column) for column in zip(*speeds, strict=True)]
    layers = shares(columns, model.workload.actor.layers)
    rates_of = [min(speed / count for speed, count in zip(chain, layers, strict=True)) for chain in speeds]
    ends = [sum(layers[: index + 1]) for index in range(len(layers))]
    spans = [(end - count, end) for end, count in zip(ends, layers, strict=True)]
    replicas = tuple(
        Replica(
            share * like.micro_batch,
            tuple(Stage(tuple(d.id for d in block), span) for block, span in zip(chain, spans, strict=True)),
        )
        for chain, share in zip(chains, shares(rates_of, units), strict=True)
    )
    sharding = "data_parallel" if len(chains) > 1 else "none"
    return replace(like, replicas=replicas, optimizer_sharding=sharding)


def _speed(model: CostModel, block: Block) -> float:
    return min(model.efficiencies.rates(device.gpu).training_flops for device in block) * len(block)


def shares(speeds: Sequence[float], units: int) -> list[int]:
    """Return how many of the units each takes so that all end together, at least one each."""
    tables = [[count / speed for count in range(1, units + 1)] for speed in speeds]
    return [share for shares in balance(tables, [1] * len(speeds), units, least=1) for share in shares]
