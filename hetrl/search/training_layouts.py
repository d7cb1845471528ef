"""Layouts of a training task on given chunks: TP x PP x DP, layer split, samples per replica, recompute, sharding.

for each choice of classes (prefixes of two orders: by speed, by nearness)
  for TP, PP, order of units (stages by class | replicas by class)
    recompute: none where it fits, else full
    optimiser: sharded, and inside more than one site also unsharded
    micro-batch: a few powers of two that fit
      layers in proportion to the stages' speed, samples to the replicas' rate
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import combinations

from hetrl.cost.compute import StageShape, has_language_head
from hetrl.cost.efficiency import rates
from hetrl.cost.memory import training_active_bytes, training_state_bytes
from hetrl.cost.stages import model_of, place
from hetrl.cost.training import Times, micro_batch_times, pipeline_seconds
from hetrl.hardware import Device, Topology
from hetrl.plan import Replica, Stage, TaskPlan
from hetrl.search.balance import balance
from hetrl.search.quick import Kinds, Quick
from hetrl.search.space import Chunk, Space, linked, powers_of_two
from hetrl.workload import Architecture, Workload

PIPELINES = (1, 2, 3, 4, 8)
KEPT_GRIDS = 8  # valued by the full model, of some hundreds
MICRO_BATCH_TOKENS = 8192  # larger micro-batches gain nothing on a GPU
Unit = tuple[Device, ...]  # the tensor-parallel ranks of one stage of one replica


@dataclass(frozen=True, eq=False)
class Grid:
    """Megatron's grid before layers and samples: `columns[r][i]` are the ranks of stage i of replica r.

    `kinds` counts the replicas by the device classes of their stages.
    """

    columns: tuple[tuple[Unit, ...], ...]
    kinds: Mapping[Kinds, int]

    @property
    def stages(self) -> int:
        """Return the pipeline's length."""
        return len(self.columns[0])

    @property
    def tensor_parallel(self) -> int:
        """Return the ranks per stage."""
        return len(self.columns[0][0])


def ranked_grids(space: Space, name: str, chunks: Sequence[Chunk]) -> list[Grid]:
    """Return the grids of a training task on the chunks, the most promising by `quick` first."""
    workload = space.problem.workload
    model = model_of(name, workload)
    quick = Quick(model, space)
    ranked: list[tuple[float, int, Grid]] = []
    for chosen in class_choices(space, name, chunks):
        for grid in _grids(space, model, [chunk for chunk in chunks if chunk.kind in chosen]):
            if len(grid.columns) <= workload.samples:
                ranked.append((quick.seconds(grid.kinds, grid.tensor_parallel), len(ranked), grid))
    return [grid for _, _, grid in sorted(ranked, key=lambda entry: entry[:2])]


def training_layouts(space: Space, name: str, grids: Sequence[Grid]) -> Iterator[TaskPlan]:
    """Yield layouts of a training task that fit their devices while they are alone there.

    The layouts of the first `KEPT_GRIDS` grids that fit are yielded.
    """
    fitting = 0
    for grid in grids:
        found = list(grid_layouts(name, grid, space))
        yield from found
        fitting += bool(found)
        if fitting == KEPT_GRIDS:
            return


def class_choices(space: Space, name: str, chunks: Sequence[Chunk]) -> list[frozenset[int]]:
    """Return the sets of classes that a training task may use: prefixes by speed and by nearness to each fast class."""
    power: dict[int, float] = {}
    for chunk in chunks:
        if space.usable(name, chunk.kind):
            added = len(chunk.devices) * rates(space.classes[chunk.kind].gpu).training_flops
            power[chunk.kind] = power.get(chunk.kind, 0.0) + added
    fastest = sorted(power, key=lambda kind: (-rates(space.classes[kind].gpu).training_flops, kind))
    orders = [fastest]
    for anchor in sorted(power, key=lambda kind: (-power[kind], kind))[:3]:
        orders.append(sorted(power, key=lambda kind: (-_link_gbps(space, anchor, kind), -power[kind], kind)))
        same_gpu = [kind for kind in orders[-1] if space.classes[kind].gpu == space.classes[anchor].gpu]
        orders.append(same_gpu)
    prefixes = {frozenset(order[:size]): None for order in orders for size in (1, 2, 3, 4, len(order))}
    return [choice for choice in prefixes if choice and _all_linked(space, choice)]


def _all_linked(space: Space, kinds: frozenset[int]) -> bool:
    pairs = combinations({space.classes[kind].site for kind in kinds}, 2)
    return all(linked(space.problem.topology, site, other) for site, other in pairs)


def _link_gbps(space: Space, kind: int, other: int) -> float:
    first, second = space.classes[kind], space.classes[other]
    if kind == other:
        return float("inf")
    if first.site == second.site:
        return 1e6
    link = space.problem.topology.link(first.site, second.site)
    return link.gbps if link else 0.0


def _grids(space: Space, model: Architecture, chunks: Sequence[Chunk]) -> Iterator[Grid]:
    largest = max(len(chunk.devices) for chunk in chunks)
    for tensor in powers_of_two(largest):
        if model.heads % tensor or model.kv_heads % tensor:
            continue
        units = _units(_chain(space, chunks), tensor)
        for pipeline in PIPELINES:
            replicas = len(units) // pipeline
            if pipeline > model.layers or replicas == 0:
                continue
            used = units[: pipeline * replicas]
            yield _grid([used[r::replicas] for r in range(replicas)])
            if pipeline > 1 and replicas > 1:
                yield _grid([used[r * pipeline : (r + 1) * pipeline] for r in range(replicas)])


def _grid(columns: Sequence[Sequence[tuple[int, Unit]]]) -> Grid:
    kinds = Counter(tuple([kind for kind, _ in column]) for column in columns)
    return Grid(tuple(tuple([unit for _, unit in column]) for column in columns), kinds)


def _chain(space: Space, chunks: Sequence[Chunk]) -> list[Chunk]:
    """Return the chunks class by class, each class followed by the nearest one that is left."""
    power: dict[int, float] = {}
    for chunk in chunks:
        added = len(chunk.devices) * rates(space.classes[chunk.kind].gpu).training_flops
        power[chunk.kind] = power.get(chunk.kind, 0.0) + added
    order = [min(power, key=lambda kind: (-power[kind], kind))]
    while len(order) < len(power):
        left = [kind for kind in power if kind not in order]
        order.append(min(left, key=lambda kind: (-_link_gbps(space, order[-1], kind), -power[kind], kind)))
    return sorted(chunks, key=lambda chunk: order.index(chunk.kind))


def _units(chunks: Sequence[Chunk], tensor: int) -> list[tuple[int, Unit]]:
    """Return the class and the devices of each group of `tensor` ranks inside a node."""
    return [
        (chunk.kind, chunk.devices[start : start + tensor])
        for chunk in chunks
        for start in range(0, len(chunk.devices) - tensor + 1, tensor)
    ]


def grid_layouts(name: str, grid: Grid, space: Space) -> Iterator[TaskPlan]:
    """Yield layouts of one grid: per micro-batch the first recompute and sharding that fit, layers and samples divided.

    Inside a site a sharded optimiser moves less; over several sites it moves more, and serves where memory is short.
    """
    workload = space.problem.workload
    sites = {space.classes[kind].site for column in grid.kinds for kind in column}
    shardings = ("none", "data_parallel") if len(sites) > 1 else ("data_parallel",)
    tries = [(r, s) for r in ("none", "full") for s in (shardings if len(grid.columns) > 1 else ("none",))]
    for micro_batch in _micro_batches(grid, workload):
        for recompute, sharding in tries:
            task = TaskPlan("megatron", (), "resident", micro_batch, recompute, "fp32", sharding)
            found = complete_layout(name, grid, task, space)
            if found is not None:
                yield found
                break


def _micro_batches(grid: Grid, workload: Workload) -> list[int]:
    """Return one to four sizes: powers of two that divide the batch, a quarter of the largest and the largest."""
    limit = max(int(MICRO_BATCH_TOKENS / workload.max_sequence_tokens), 1)
    limit = min(limit, 64, workload.samples // len(grid.columns))
    sizes = [size for size in powers_of_two(limit) if workload.samples % size == 0]
    return sorted({1, sizes[-1], sizes[-1] // 4 or 1} if grid.stages > 1 else {1, sizes[-1]})


def complete_layout(name: str, grid: Grid, task: TaskPlan, space: Space) -> TaskPlan | None:
    """Return the task with replicas: balanced layers and samples; None where the memory does not suffice."""
    split = split_layers(name, grid, task, space)
    if split is None:
        return None
    bounds = [sum(split[:index]) for index in range(len(split) + 1)]
    columns = [
        tuple(Stage(tuple(d.id for d in unit), (bounds[i], bounds[i + 1])) for i, unit in enumerate(column))
        for column in grid.columns
    ]
    samples = _samples(name, columns, task, space)
    if samples is None:
        return None
    return replace(task, replicas=tuple(Replica(n, stages) for n, stages in zip(samples, columns, strict=True)))


def split_layers(name: str, grid: Grid, task: TaskPlan, space: Space) -> list[int] | None:
    """Return the layers per stage: the one that would end first gets the next layer, within its memory.

    The vocabulary product counts as layers of the last stage. None where the memory of the stages does not suffice.
    """
    workload = space.problem.workload
    model = model_of(name, workload)
    stage_gpus = [{space.classes[column[index]].gpu for column in grid.kinds} for index in range(grid.stages)]
    shards = len(grid.columns) if task.optimizer_sharding == "data_parallel" else 1
    capacity = []
    for index in range(grid.stages):
        shape = _shape(name, model, grid, index, workload)
        memory_gb = min(rates(gpu).usable_gb for gpu in stage_gpus[index])
        capacity.append(_most_layers(shape, memory_gb, grid.stages - index, shards, task, workload))
    if min(capacity) < 1 or sum(capacity) < model.layers:
        return None
    speeds = [min(rates(gpu).training_flops for gpu in gpus) for gpus in stage_gpus]
    extra = [0.0] * grid.stages
    extra[-1] = model.head_parameters / model.layer_matrix_parameters if has_language_head(name) else 0.0
    split = [1] * grid.stages
    for _ in range(model.layers - grid.stages):
        open_stages = [index for index in range(grid.stages) if split[index] < capacity[index]]
        chosen = min(open_stages, key=lambda index: (split[index] + 1 + extra[index]) / speeds[index])
        split[chosen] += 1
    return split


def _shape(name: str, model: Architecture, grid: Grid, index: int, workload: Workload) -> StageShape:
    first, last = index == 0, index == grid.stages - 1
    gpu = grid.columns[0][index][0].gpu
    head = has_language_head(name)
    return StageShape(model, 0, first, last, head, grid.tensor_parallel, gpu, workload.weight_bytes)


@lru_cache(maxsize=100_000)
def _most_layers(
    shape: StageShape, memory_gb: float, in_flight: int, shards: int, task: TaskPlan, workload: Workload
) -> int:
    """Return how many layers fit in a stage: what it holds is linear in its layers."""
    tokens = task.micro_batch * workload.max_sequence_tokens

    def held(layers: int) -> float:
        stage = replace(shape, layers=layers)
        active = training_active_bytes(stage, in_flight, tokens, task.recompute)
        return sum(training_state_bytes(stage, shards)) + active

    return int((memory_gb * 1e9 - held(0)) // (held(1) - held(0)))


def _samples(name: str, columns: Sequence[tuple[Stage, ...]], task: TaskPlan, space: Space) -> list[int] | None:
    """Return the samples per replica, in proportion to the rate; whole micro-batches of every minibatch if possible."""
    topology, workload = space.problem.topology, space.problem.workload
    minibatches = max(workload.optimizer_steps_per_iteration // workload.epochs, 1)
    unit = task.micro_batch * minibatches
    if workload.samples % unit or workload.samples // unit < len(columns):
        unit = task.micro_batch
    units = workload.samples // unit
    if workload.samples % unit or units < len(columns):
        return None
    kinds: dict[object, list[int]] = {}
    for index, stages in enumerate(columns):
        devices = (topology.device_by_id[stage.devices[0]] for stage in stages)
        kinds.setdefault(tuple((device.site, device.gpu) for device in devices), []).append(index)
    if len(kinds) == 1 and units % len(columns) == 0:
        return [workload.samples // len(columns)] * len(columns)
    tables = []
    for members in kinds.values():
        times = _column_times(name, columns[members[0]], task, topology, workload)
        per_unit = unit // task.micro_batch
        most = math.ceil(units * per_unit / minibatches)
        seconds = _pipeline_table(times, most)
        tables.append([seconds[math.ceil(n * per_unit / minibatches) - 1] for n in range(1, units + 1)])
    shares = balance(tables, [len(members) for members in kinds.values()], units, least=1)
    samples = [0] * len(columns)
    for members, share in zip(kinds.values(), shares, strict=True):
        for index, count in zip(members, share, strict=True):
            samples[index] = count * unit
    return samples


def _pipeline_table(times: Sequence[Times], most: int) -> list[float]:
    """Return the time of 1, 2, ... micro-batches; once the pipeline is full each adds the same."""
    table = [pipeline_seconds(times, count) for count in range(1, min(len(times) + 1, most) + 1)]
    if len(table) < most:
        period = table[-1] - table[-2]
        table += [table[-1] + period * extra for extra in range(1, most - len(table) + 1)]
    return table


def _column_times(
    name: str, stages: tuple[Stage, ...], task: TaskPlan, topology: Topology, workload: Workload
) -> list[Times]:
    tokens = task.micro_batch * workload.sequence_tokens
    placed = place(name, Replica(1, stages), topology, workload)
    return [micro_batch_times(stage, tokens, task.recompute, workload.sequence_tokens) for stage in placed]
