"""The devices of every site as boxes: who works where, and how full the memory becomes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from hetrl.gpus import gpu_catalogue, gpu_type
from hetrl.plan.plan import Plan, site_of
from hetrl.report.page import Mark, mark_of_device
from hetrl.report.text import figure, spoken


@dataclass(frozen=True)
class Box:
    """One device: the mark of its group, its tasks, and how full its usable memory becomes (per cent)."""

    device: str
    mark: Mark | None
    tasks: tuple[str, ...]
    memory: float | None
    title: str

    @property
    def index(self) -> str:
        """Return the device's number in its node."""
        return self.device.rsplit("/", 1)[1]


@dataclass(frozen=True)
class NodeBox:
    """One node; `gpu` is empty where the type is not known."""

    name: str
    gpu: str
    boxes: tuple[Box, ...]


@dataclass(frozen=True)
class SiteBox:
    """One site."""

    name: str
    nodes: tuple[NodeBox, ...]


def device_map(plan: Plan, gpus: Mapping[str, str]) -> tuple[SiteBox, ...]:
    """Return the sites of `gpus` (device -> catalogue GPU) in its order; without it, those that the plan uses."""
    known = gpus or {device: "" for group in plan.groups for device in group.devices}
    mark_of, tasks_of = mark_of_device(plan), _tasks_of(plan)
    sites: dict[str, dict[str, list[Box]]] = {}
    for device, gpu in known.items():
        site, node, _ = device.split("/", 2)
        sites.setdefault(site, {}).setdefault(node, []).append(
            _box(device, gpu, mark_of.get(device), tasks_of.get(device, ()), plan.predicted.peak_memory_gb.get(device))
        )
    return tuple(
        SiteBox(site, tuple(NodeBox(node, known[boxes[0].device], tuple(boxes)) for node, boxes in nodes.items()))
        for site, nodes in sites.items()
    )


def _tasks_of(plan: Plan) -> dict[str, tuple[str, ...]]:
    """Return the tasks of each device that has any, in the plan's order."""
    tasks: dict[str, tuple[str, ...]] = {}
    for name, task in plan.tasks.items():
        for device in dict.fromkeys(task.devices):
            tasks[device] = (*tasks.get(device, ()), name)
    return tasks


def _box(device: str, gpu: str, mark: Mark | None, tasks: tuple[str, ...], peak: float | None) -> Box:
    parts, memory = [", ".join(map(spoken, tasks)) or "idle"], None
    if peak is not None and gpu in gpu_catalogue():
        usable = gpu_type(gpu).usable_gb
        parts.append(f"peak {figure(peak)} of {figure(usable)} GB usable")
        memory = min(100.0, round(100 * peak / usable, 1))
    return Box(device, mark, tasks, memory, f"{device}{f' ({gpu})' if gpu else ''}: {'; '.join(parts)}")


def sites_of(plan: Plan, tasks: Iterable[str]) -> dict[str, str]:
    """Return the sites of each of the tasks that has devices, joined by commas."""
    found = {name: plan.tasks[name] for name in tasks if name in plan.tasks}
    return {name: ", ".join(dict.fromkeys(site_of(device) for device in task.devices)) for name, task in found.items()}
