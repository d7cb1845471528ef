"""From a plan to the Slurm jobs of every site: which processes stand on which nodes of which job. Pure functions.

Where Slurm grants single GPUs, a replica of an array group is one task of the array. Where it grants whole nodes, the
replicas of one node are one task, or steps of the gang if that has the node; a gang without a node takes one. The first
node of the gang is the best-connected one that the plan has of the site, since the gateway stands there. Nodes of equal
shape are one component of the gang, tasks of equal shape are one array.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from hetrl.describe.sites import SiteFile
from hetrl.errors import UsageError
from hetrl.hardware import Topology
from hetrl.plan.plan import Plan
from hetrl.report.text import ranges
from hetrl.runtime.wire import CONTROLLER, GATEWAY
from launch.render import ARRAY, EMULATED, GANG, Process, array_name, index_of, render
from launch.slurm.resources import GATEWAY_SHAPE, Shape, shape_of


@dataclass(frozen=True)
class Placed:
    """A process, and where each device of its node stands among those that Slurm grants there."""

    process: Process
    positions: Mapping[str, int]


@dataclass(frozen=True)
class Component:
    """The equal nodes of a gang, or of an array's tasks: the slots of the plan that they stand for."""

    shape: Shape
    slots: tuple[str, ...]


@dataclass(frozen=True)
class Step:
    """Processes that one srun starts, and how many stand on which node of the job."""

    name: str
    members: tuple[Placed, ...]
    tasks_by_node: Mapping[int, int]
    component: int = 0


@dataclass(frozen=True)
class GangLayout:
    """A site's gang. Nodes are counted through all components."""

    site: str
    components: tuple[Component, ...]
    steps: tuple[Step, ...]


@dataclass(frozen=True)
class ArrayLayout:
    """An array: equal tasks on equal nodes."""

    site: str
    name: str
    shape: Shape
    tasks: tuple[tuple[Placed, ...], ...]


def layouts(
    plan: Plan, topology: Topology, files: Mapping[str, SiteFile], *, emulates: bool = False
) -> tuple[tuple[GangLayout, ...], tuple[ArrayLayout, ...]]:
    """Return the gang of every site, the lead site's first, and the arrays; with emulated engines where `emulates`.

    Raises UsageError for a plan that cannot be started (`launch.render.check_startable`).
    """
    gpus = {device.id: device.gpu for device in topology.devices}
    gangs: dict[str, list[Process]] = {}
    arrays: dict[str, list[Process]] = {site: [] for site in plan.site_order}
    for job in render(plan, gpus, emulates=emulates):
        if job.kind == GANG:
            gangs[job.site] = [*job.tasks]
        else:
            arrays[job.site] += job.tasks
    found: list[ArrayLayout] = []
    for site, alone in arrays.items():
        joining = _joining(files[site], topology, gangs[site], alone)
        gangs[site] += [one for one in alone if one.node in joining]
        found += _arrays(files[site], topology, [one for one in alone if one.node not in joining])
    return tuple(_gang(files[site], topology, processes) for site, processes in gangs.items()), tuple(found)


def _joining(file: SiteFile, topology: Topology, gang: Sequence[Process], alone: Sequence[Process]) -> frozenset[str]:
    """Return the slots whose replicas of array groups stand in the gang, whose first node has the gateway.

    Where whole nodes are granted: on the gang's nodes, and on one where it has none, for a gateway alone would keep
    that from every job that wants it as a whole. And where the gateway's node would be worse connected than the best
    that the site has of the plan, on that one, since all that crosses between sites passes the gateway.
    """
    own = {one.node for one in gang if one.devices}
    if not alone:
        return frozenset()
    whole = file.allocation == "node"
    nodes = {slot: topology.node_by_id[slot] for slot in (*own, *(one.node for one in alone))}
    uplinks = {slot: node.uplink_gbps for slot, node in nodes.items()}
    stands = max((uplinks[slot] for slot in own), default=0.0 if whole else min(uplinks.values()))
    best = max((one.node for one in alone), key=lambda slot: nodes[slot].reach)
    return frozenset([*(own if whole else ()), *([best] if uplinks[best] > stands else [])])


def parts_of(array: ArrayLayout, largest: int) -> list[ArrayLayout]:
    """Split an array that has more tasks than the cluster allows (indices stay below MaxArraySize).

    Raises UsageError for a cluster without arrays.
    """
    if largest < 1:
        raise UsageError(
            f"{array.site}: the cluster takes no job arrays (MaxArraySize=0 in its slurm.conf), and {array.name} is "
            "one; ask its administrators for a MaxArraySize, or leave the site out of the topology"
        )
    if len(array.tasks) <= largest:
        return [array]
    starts = range(0, len(array.tasks), largest)
    return [
        replace(array, name=f"{array.name}-part{number}", tasks=array.tasks[start : start + largest])
        for number, start in enumerate(starts)
    ]


def spoken_steps(steps: Sequence[Step]) -> str:
    """Say what the steps of a gang are: `gateway, controller, actor_training (8 ranks)`."""
    processes = [one.process for step in steps for one in step.members]
    fixed = [process.role for process in processes if process.role in (GATEWAY, CONTROLLER, EMULATED)]
    ranks = Counter(process.role for process in processes if process.world)
    training = [f"{task} ({count} {'rank' if count == 1 else 'ranks'})" for task, count in ranks.items()]
    replicas = [process for process in processes if process.rank is not None and not process.world]
    return ", ".join([*fixed, *training, *([spoken_replicas(replicas)] if replicas else [])])


def spoken_replicas(replicas: Sequence[Process]) -> str:
    """Say which replicas: `actor_generation replicas 0-7, 9`."""
    if len(replicas) == 1:
        return replicas[0].spoken
    shown = ranges(replica.rank or 0 for replica in replicas).replace(",", ", ")
    return f"{replicas[0].role} replicas {shown}"


def _positions(file: SiteFile, devices: Iterable[str]) -> dict[str, int]:
    """Return where each device stands among those that Slurm grants on its node: all of it, or only those in use."""
    used = sorted(set(devices), key=index_of)
    if file.allocation == "node":
        return {device: index_of(device) for device in used}
    return {device: position for position, device in enumerate(used)}


def _gang(file: SiteFile, topology: Topology, processes: Sequence[Process]) -> GangLayout:
    """Lay a site's gang out, its best-connected node first; without devices, as emulated engines are, a core of one."""
    used: dict[str, list[str]] = {}
    for one in processes:
        if one.devices:
            used.setdefault(one.node, []).extend(one.devices)
    used = dict(sorted(used.items(), key=lambda entry: topology.node_by_id[entry[0]].reach, reverse=True))
    positions = {slot: _positions(file, devices) for slot, devices in used.items()}
    slots_by_shape: dict[Shape, list[str]] = {}
    for slot in used:
        shape = shape_of(file, topology.node_by_id[slot], len(positions[slot]))
        slots_by_shape.setdefault(shape, []).append(slot)
    components = [Component(shape, tuple(slots)) for shape, slots in slots_by_shape.items()]
    components = components or [Component(GATEWAY_SHAPE, (processes[0].node,))]
    steps: list[Step] = []
    for name, members in _by_step(processes).items():
        steps += _steps(name, members, components, positions)
    return GangLayout(file.name, tuple(components), tuple(steps))


def _by_step(processes: Iterable[Process]) -> dict[str, list[Process]]:
    """Group the processes by step: the ranks of a task are one, everything else stands alone."""
    steps: dict[str, list[Process]] = {}
    for one in processes:
        steps.setdefault(one.role if one.world else one.name, []).append(one)
    return steps


def _steps(
    name: str, members: Sequence[Process], components: Sequence[Component], positions: Mapping[str, Mapping[str, int]]
) -> list[Step]:
    """Return the step of these processes; one per component where they stand in several."""
    slots = [(slot, component) for component, one in enumerate(components) for slot in one.slots]
    place = {slot: (number, component) for number, (slot, component) in enumerate(slots)}
    found: dict[int, list[tuple[int, Placed]]] = {}
    for one in members:
        # Gateway and controller own no device; they stand on the first node.
        number, component = place[one.node] if one.devices else (0, 0)
        found.setdefault(component, []).append((number, Placed(one, positions.get(one.node, {}))))
    steps = []
    for component, numbered in sorted(found.items()):
        numbered.sort(key=lambda pair: pair[0])  # srun counts tasks node by node; the order of ranks stays in each
        tasks = Counter(number for number, _ in numbered)
        step = name if len(found) == 1 else f"{name}.{component}"
        steps.append(Step(step, tuple(placed for _, placed in numbered), dict(tasks), component))
    return steps


def _arrays(file: SiteFile, topology: Topology, replicas: Sequence[Process]) -> list[ArrayLayout]:
    """Return the arrays of a site: a task per replica, or per node where whole nodes are granted."""
    whole = file.allocation == "node"
    units: dict[str, list[Process]] = {}
    for one in replicas:
        units.setdefault(one.node if whole else one.name, []).append(one)
    tasks: dict[tuple[Shape, tuple[int, ...]], list[tuple[Placed, ...]]] = {}
    for unit in units.values():
        devices = [device for one in unit for device in one.devices]
        shape = shape_of(file, topology.node_by_id[unit[0].node], len(devices))
        positions = _positions(file, devices)
        sizes = tuple(sorted(len(one.devices) for one in unit))
        tasks.setdefault((shape, sizes), []).append(tuple(Placed(one, positions) for one in unit))
    arrays, named = [], Counter[str]()
    for (shape, sizes), placed in tasks.items():
        name = _array_name(shape, sizes)
        named[name] += 1
        name += f"-shape{named[name]}" if named[name] > 1 else ""  # the same GPUs on nodes of another size
        arrays.append(ArrayLayout(file.name, name, shape, tuple(placed)))
    return arrays


def _array_name(shape: Shape, sizes: tuple[int, ...]) -> str:
    """Name an array by its GPU and the replicas of a task: array-l4, array-l4-x2 (on two GPUs), array-l4-8x1."""
    if len(sizes) == 1:
        return array_name(str(shape.gpu), sizes[0])
    return "-".join([ARRAY, str(shape.gpu), *(f"{count}x{size}" for size, count in sorted(Counter(sizes).items()))])
