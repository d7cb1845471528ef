"""What a plan's seconds are made of: the derivative of each time by the slowness of each resource.

Every time of the cost model is made of amounts over rates, delays and fixed times, by sums, maxima and roots: it
doubles if all of them take twice as long. So it is the sum of its derivatives (Euler's theorem on homogeneous
functions):

    seconds = sum over resources of d seconds / d slowness          slowness: 1, twice as slow: 2

Only what somebody waits for counts. A transfer that hides behind a longer one has the derivative 0. Where several
resources end together there is a kink and no derivative: slower, each of them costs the whole time, faster, none saves
any. A part is then what both directions agree on, and what these leave over is shared by how far they disagree:

    part = least + (seconds - sum of least) * bend / sum of bends         least: the smaller one of both differences
                                                                          bend: how much larger the other one is
A derivative may be negative: in mode async a version that is slower may find generation running, and one that is
trained later may have the link to itself. No formula of the cost model is repeated here: the derivative is taken from
three predictions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TypeVar

from hetrl.cost.efficiency import Overhead, Rates
from hetrl.cost.iteration import SYNCS, plan_seconds, predict, sync_costs, task_costs
from hetrl.cost.model import CostModel
from hetrl.hardware import Link, Site, Topology
from hetrl.plan.plan import Plan
from hetrl.workload import ITERATION

Key = TypeVar("Key")
MOVES = "state in and out"  # of GPU memory: what `idle_state: offload` costs
STEP = 1e-3  # of the differences: the error of a central one is of the order of 1e-6
LEAST = 1e-4  # smaller shares of a time, either way, are left out


@dataclass(frozen=True)
class Part:
    """What one resource (or task) adds to a time, in seconds; negative where slower, it would save some."""

    name: str
    seconds: float


@dataclass(frozen=True)
class Slope:
    """How fast a time grows where a resource (or task) takes longer, and falls where it takes less long."""

    name: str
    slower: float
    faster: float

    @property
    def central(self) -> float:
        """Return the central difference, the derivative where there is one."""
        return (self.slower + self.faster) / 2

    @property
    def bend(self) -> float:
        """Return by how much both sides differ."""
        return abs(self.slower - self.faster)


@dataclass(frozen=True)
class Resource:
    """Something that takes time: `slower` returns the cost model with it slower by a factor."""

    name: str
    slower: Callable[[CostModel, float], CostModel]


def resources(plan: Plan, topology: Topology) -> list[Resource]:
    """Return what can make this plan slow: per GPU type in use, inside sites, and each link that carries anything."""
    gpus = {topology.device_by_id[device].gpu for device in plan.devices}
    found = [resource for gpu in sorted(gpus) for resource in _of_gpu(gpu)]
    found.append(Resource("GPU to GPU in a node", _of_sites(_slower_peers)))
    found.append(Resource("network of the nodes", _of_sites(_slower_nodes)))
    for link in used_links(plan, topology):
        name = f"link {link.between[0]}–{link.between[1]}"
        found.append(Resource(name, _of_topology(_slower_link(link))))
    return found


def used_links(plan: Plan, topology: Topology) -> Iterator[Link]:
    """Yield the links that carry anything of the plan."""
    carrying = {frozenset((r.source, r.target)) for r in plan.weight_sync.routes}
    for link in topology.links:
        loads = [f"{a}-{b}" for a, b in (link.between, link.between[::-1])]
        if frozenset(link.between) in carrying or any(load in plan.predicted.wan_gb_per_iteration for load in loads):
            yield link


def _of_gpu(gpu: str) -> Iterator[Resource]:
    def of_type(change: Callable[[Rates, float], Rates]) -> Callable[[CostModel, float], CostModel]:
        def slower(model: CostModel, factor: float) -> CostModel:
            known = model.efficiencies
            return replace(model, efficiencies=known.with_rates(gpu, change(known.rates(gpu), factor)))

        return slower

    yield Resource(f"{gpu}: compute", of_type(_divided("prefill_flops", "training_flops")))
    memory = ("decode_bytes", "activation_bytes_per_s", "memory_bytes_per_s")
    yield Resource(f"{gpu}: memory bandwidth", of_type(_divided(*memory)))
    yield Resource(f"{gpu}: PCIe", of_type(_divided("host_bytes_per_s")))
    yield Resource(f"{gpu}: launches and calls", of_type(_slower_overhead))


def _divided(*names: str) -> Callable[[Rates, float], Rates]:
    return lambda rates, factor: replace(rates, **{name: getattr(rates, name) / factor for name in names})


def _slower_overhead(rates: Rates, factor: float) -> Rates:
    times = {field.name: getattr(rates.overhead, field.name) * factor for field in fields(Overhead)}
    return replace(rates, overhead=Overhead(**times))


def _of_topology(change: Callable[[Topology, float], Topology]) -> Callable[[CostModel, float], CostModel]:
    return lambda model, factor: replace(model, topology=change(model.topology, factor))


def _of_sites(change: Callable[[Site, float], Site]) -> Callable[[CostModel, float], CostModel]:
    def slower(topology: Topology, factor: float) -> Topology:
        return replace(topology, sites=tuple(change(site, factor) for site in topology.sites))

    return _of_topology(slower)


def _slower_peers(site: Site, factor: float) -> Site:
    peers = [node.gpu_type.peer_gbps / factor for node in site.nodes]
    nodes = tuple(replace(node, peer_gbps=gbps) for node, gbps in zip(site.nodes, peers, strict=True))
    return replace(site, nodes=nodes, node_delay_ms=site.node_delay_ms * factor)


def _slower_nodes(site: Site, factor: float) -> Site:
    nodes = tuple(
        replace(node, nic_gbps=node.nic_gbps / factor, wan_gbps=node.wan_gbps and node.wan_gbps / factor)
        for node in site.nodes
    )
    return replace(site, nodes=nodes, delay_ms=site.delay_ms * factor)


def _slower_link(slow: Link) -> Callable[[Topology, float], Topology]:
    def slower(topology: Topology, factor: float) -> Topology:
        changed = replace(slow, gbps=slow.gbps / factor, delay_ms=slow.delay_ms * factor)
        return replace(topology, links=tuple(changed if link == slow else link for link in topology.links))

    return slower


def attribution(plan: Plan, model: CostModel) -> dict[str, tuple[Part, ...]]:
    """Return, for each task, weight sync and `iteration`, the seconds of each resource, largest first.

    They sum to the predicted seconds. Nothing for a time that is infinite.
    """
    return derivatives(resources(plan, model.topology), model, lambda asked: _times(plan, asked))


def derivatives(
    among: list[Resource], model: CostModel, times: Callable[[CostModel], Mapping[str, float]]
) -> dict[str, tuple[Part, ...]]:
    """Return the parts of each of the times that a function of the cost model returns."""
    usual = times(model)
    slopes: dict[str, list[Slope]] = {name: [] for name in usual}
    for resource in among:
        slow = times(resource.slower(model, 1 + STEP))
        if slow == usual:  # nobody waits for it, as for most links of many sites
            continue
        fast = times(resource.slower(model, 1 - STEP))
        for name, seconds in usual.items():
            slopes[name].append(_slope(resource.name, seconds, slow[name], fast[name]))
    return {name: _largest_first(parts_of(found, usual[name])) for name, found in slopes.items()}


def _slope(name: str, usual: float, slow: float, fast: float) -> Slope:
    return Slope(name, (slow - usual) / STEP, (usual - fast) / STEP)


def parts_of(slopes: Sequence[Slope], seconds: float) -> list[Part]:
    """Return the part of each slope in a time: they sum to it where there is a kink, too.

    What saves time by being slower keeps its central difference.
    """
    bends = sum(slope.bend for slope in slopes if slope.central > 0)
    if not bends > LEAST * seconds:
        return [Part(slope.name, slope.central) for slope in slopes]
    least = [slope.central - slope.bend / 2 if slope.central > 0 else slope.central for slope in slopes]
    shared = (seconds - sum(least)) / bends
    return [
        Part(slope.name, own + shared * slope.bend if slope.central > 0 else own)
        for slope, own in zip(slopes, least, strict=True)
    ]


def _times(plan: Plan, model: CostModel) -> Mapping[str, float]:
    found = predict(plan, model)
    return {**found.tasks, ITERATION: found.iteration_seconds}


def _largest_first(parts: list[Part]) -> tuple[Part, ...]:
    total = sum(part.seconds for part in parts)
    if not math.isfinite(total):
        return ()
    kept = [part for part in parts if abs(part.seconds) > LEAST * total]
    return tuple(sorted(kept, key=lambda part: -part.seconds))


def critical_path(plan: Plan, model: CostModel) -> tuple[Part, ...]:
    """Return the seconds that each task and weight sync add to the iteration, in the order of the plan.

    A task of which nobody waits for the end adds 0; what moves state in and out of GPU memory is the last part. They
    sum to the iteration.
    """
    costs, syncs = task_costs(plan, model), sync_costs(plan, model)
    total = plan_seconds(plan, costs, syncs, model)
    trained = {SYNCS[name]: name for name in syncs}
    if not math.isfinite(total):
        return ()

    def scaled(name: str, factor: float) -> float:
        if name in trained:
            sync = syncs[trained[name]]
            longer_sync = replace(
                sync,
                encode_seconds=sync.encode_seconds * factor,
                uplink_seconds=sync.uplink_seconds * factor,
                fan_out_seconds=sync.fan_out_seconds * factor,
                pause_seconds=sync.pause_seconds * factor,
                wan_bytes=_scaled(sync.wan_bytes, factor),
                way_seconds=_scaled(sync.way_seconds, factor),
            )
            return plan_seconds(plan, costs, {**syncs, trained[name]: longer_sync}, model)
        cost = costs[name]
        parts, moved, ahead = (_scaled(of, factor) for of in (cost.parts, cost.wan_bytes, cost.scored_bytes))
        seconds = cost.seconds * factor
        longer = replace(cost, seconds=seconds, parts=parts, wan_bytes=moved, scored_bytes=ahead)
        return plan_seconds(plan, {**costs, name: longer}, syncs, model)

    slopes = [_slope(name, total, scaled(name, 1 + STEP), scaled(name, 1 - STEP)) for name in (*costs, *trained)]
    moves = (plan_seconds(plan, costs, syncs, _slower_moves(plan, model, factor)) for factor in (1 + STEP, 1 - STEP))
    *found, _ = parts_of([*slopes, _slope(MOVES, total, *moves)], total)
    rest = total - sum(part.seconds for part in found)
    return (*found, Part(MOVES, rest)) if abs(rest) > LEAST * total else tuple(found)


def _slower_moves(plan: Plan, model: CostModel, factor: float) -> CostModel:
    """Return the cost model with a slower PCIe: of given costs, it changes what moves state in and out alone."""
    for gpu in {model.topology.device_by_id[device].gpu for device in plan.devices}:
        slower = _divided("host_bytes_per_s")(model.efficiencies.rates(gpu), factor)
        model = replace(model, efficiencies=model.efficiencies.with_rates(gpu, slower))
    return model


def _scaled(amounts: Mapping[Key, float], factor: float) -> dict[Key, float]:
    return {key: amount * factor for key, amount in amounts.items()}
