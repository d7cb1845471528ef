"""From a plan to the Slurm jobs of every site: which processes stand on which nodes of which job. Pure functions.

Where Slurm grants single GPUs, a replica of an array group is one task of the array. Where it grants whole nodes, the
replicas of one node are one task, or steps of the gang if that has the node; a gang without a node takes the first one.
Nodes of equal shape are one component of the gang, tasks of equal shape are one array.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from hetrl.describe.sites import SiteFile
from hetrl.hardware import Topology
from hetrl.plan.plan import Plan
from hetrl.runtime.run.step import Row
from launch.render import Process, render
from launch.slurm.resources import GATEWAY_SHAPE, Shape, shape_of

GANG = "gang"
ARRAY = "array"
_VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class Placed:
    """A process with the device ids that it uses (none: the gateway, the controller)."""

    process: Process
    devices: tuple[str, ...]

    def row(self, positions: Mapping[str, int]) -> Row:
        """Return what its node starts; `positions` counts the devices that Slurm grants there, by id."""
        environment = dict(self.process.environment)
        if _VISIBLE in environment:
            ids = (f"{self.process.node}/{index}" for index in environment[_VISIBLE].split(","))
            environment[_VISIBLE] = ",".join(str(positions[device]) for device in ids)
        world = self.process.name.rpartition("-")[0] if "HETRL_RANK" in environment else None
        return Row(self.process.name, self.process.argv, environment, world)


@dataclass(frozen=True)
class Component:
    """The equal nodes of a gang, or of an array's tasks: the slots of the plan that they stand for."""

    shape: Shape
    slots: tuple[str, ...]


@dataclass(frozen=True)
class Step:
    """Processes that one srun starts: their rows, and how many stand on which node of the job."""

    name: str
    rows: tuple[Row, ...]
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
    tasks: tuple[tuple[Row, ...], ...]


def layouts(
    plan: Plan, topology: Topology, files: Mapping[str, SiteFile], run: str
) -> tuple[tuple[GangLayout, ...], tuple[ArrayLayout, ...]]:
    """Return the gang of every site, the lead site's first, and the arrays.

    Raises UsageError for a plan that cannot be started (`launch.render.check_startable`).
    """
    gpus = {device.id: device.gpu for device in topology.devices}
    gangs: dict[str, list[Placed]] = {}
    arrays: dict[str, list[Placed]] = {site: [] for site in plan.site_order}
    for job in render(plan, gpus, run, {}):
        placed = [Placed(process, _devices_of(plan, process.name)) for process in job.tasks]
        if job.kind == GANG:
            gangs[job.site] = placed
        else:
            arrays[job.site] += placed
    found: list[ArrayLayout] = []
    for site, placed in arrays.items():
        if files[site].allocation == "node":
            # A gateway alone would keep one node from every job that wants it as a whole.
            taken = {one.process.node for one in gangs[site] if one.devices} or {placed[0].process.node}
            gangs[site] += [one for one in placed if one.process.node in taken]
            placed = [one for one in placed if one.process.node not in taken]
        found += _arrays(files[site], topology, placed)
    return tuple(_gang(files[site], topology, placed) for site, placed in gangs.items()), tuple(found)


def _devices_of(plan: Plan, process: str) -> tuple[str, ...]:
    """Return the devices of a rank or a replica by its name, none for the gateway and the controller."""
    name, _, number = process.rpartition("-")
    if name not in plan.tasks:
        return ()
    task = plan.tasks[name]
    return task.replicas[int(number)].devices if task.engine == "vllm" else (task.rank_order()[int(number)],)


def _positions(file: SiteFile, devices: Iterable[str]) -> dict[str, int]:
    """Return where each device stands among those that Slurm grants on its node: all of it, or only those in use."""
    used = sorted(set(devices), key=_index)
    if file.allocation == "node":
        return {device: _index(device) for device in used}
    return {device: position for position, device in enumerate(used)}


def _index(device: str) -> int:
    return int(device.rsplit("/", 1)[1])


def _gang(file: SiteFile, topology: Topology, placed: Sequence[Placed]) -> GangLayout:
    """Lay a site's gang out; a site with arrays only has the gateway on one node."""
    used: dict[str, list[str]] = {}
    for one in placed:
        if one.devices:
            used.setdefault(one.process.node, []).extend(one.devices)
    positions = {slot: _positions(file, devices) for slot, devices in used.items()}
    slots_by_shape: dict[Shape, list[str]] = {}
    for slot in used:
        shape = shape_of(file, topology.node_by_id[slot], len(positions[slot]))
        slots_by_shape.setdefault(shape, []).append(slot)
    components = [Component(shape, tuple(slots)) for shape, slots in slots_by_shape.items()]
    components = components or [Component(GATEWAY_SHAPE, (placed[0].process.node,))]
    steps: list[Step] = []
    for name, members in _by_step(placed).items():
        steps += _steps(name, members, components, positions)
    return GangLayout(file.name, tuple(components), tuple(steps))


def _by_step(placed: Iterable[Placed]) -> dict[str, list[Placed]]:
    """Group the processes by step: the ranks of a task are one, everything else stands alone."""
    steps: dict[str, list[Placed]] = {}
    for one in placed:
        name = one.process.name
        is_rank = "HETRL_RANK" in one.process.environment
        steps.setdefault(name.rpartition("-")[0] if is_rank else name, []).append(one)
    return steps


def _steps(
    name: str,
    members: Sequence[Placed],
    components: Sequence[Component],
    positions: Mapping[str, Mapping[str, int]],
) -> list[Step]:
    """Return the step of these processes; one per component where they stand in several."""
    place = {
        slot: (number, component)
        for number, (slot, component) in enumerate(
            (slot, component) for component, one in enumerate(components) for slot in one.slots
        )
    }
    found: dict[int, list[tuple[int, Row]]] = {}
    for one in members:
        # Gateway and controller own no device; they stand on the first node.
        number, component = place[one.process.node] if one.devices else (0, 0)
        found.setdefault(component, []).append((number, one.row(positions.get(one.process.node, {}))))
    steps = []
    for component, numbered in sorted(found.items()):
        numbered.sort(key=lambda pair: pair[0])  # srun counts tasks node by node; the order of ranks stays in each
        tasks = Counter(number for number, _ in numbered)
        step = name if len(found) == 1 else f"{name}.{component}"
        steps.append(Step(step, tuple(row for _, row in numbered), dict(tasks), component))
    return steps


def _arrays(file: SiteFile, topology: Topology, placed: Sequence[Placed]) -> list[ArrayLayout]:
    """Return the arrays of a site: a task per replica, or per node where whole nodes are granted."""
    whole = file.allocation == "node"
    units: dict[str, list[Placed]] = {}
    for one in placed:
        units.setdefault(one.process.node if whole else one.process.name, []).append(one)
    tasks: dict[tuple[Shape, tuple[int, ...]], list[tuple[Row, ...]]] = {}
    for unit in units.values():
        devices = [device for one in unit for device in one.devices]
        shape = shape_of(file, topology.node_by_id[unit[0].process.node], len(devices))
        positions = _positions(file, devices)
        sizes = tuple(sorted(len(one.devices) for one in unit))
        tasks.setdefault((shape, sizes), []).append(tuple(one.row(positions) for one in unit))
    arrays, named = [], Counter[str]()
    for (shape, sizes), rows in tasks.items():
        name = _array_name(shape, sizes)
        named[name] += 1
        name += f"-shape{named[name]}" if named[name] > 1 else ""  # the same GPUs on nodes of another size
        arrays.append(ArrayLayout(file.name, name, shape, tuple(rows)))
    return arrays


def _array_name(shape: Shape, sizes: tuple[int, ...]) -> str:
    """Name an array by its GPU and the replicas of a task: array-l4, array-l4-x2 (on two GPUs), array-l4-8x1."""
    if len(sizes) == 1:
        return f"{ARRAY}-{shape.gpu}" + (f"-x{sizes[0]}" if sizes[0] > 1 else "")
    return "-".join([ARRAY, str(shape.gpu), *(f"{count}x{size}" for size, count in sorted(Counter(sizes).items()))])
