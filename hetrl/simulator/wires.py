"""Transfers over shared wires: concurrent flows share bandwidth max-min fairly.

    a flow passes wires: GPU lanes inside a node; the nodes' NICs inside a site; NICs, caps and the link between sites
    whenever a flow starts or ends, the flows that share a wire with it get their rates anew:
      repeat: the wire with the least bandwidth per open flow fixes that rate for its flows; take it off their wires
    flows of a later rank share what those of earlier ranks leave: weights give way to trainings between sites, where
    gateways see to it, and a model's to another's (`hetrl.workload.versions_ahead`); inside a site trainings have no
    precedence
    a flow has arrived one delay after its last byte has left

Each wire is one direction. Source of the filling: Bertsekas and Gallager, Data Networks (2nd ed.), section 6.5.2.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from hetrl.errors import HetrlError
from hetrl.hardware import Device, Topology, bytes_per_second
from hetrl.simulator.events import Clock, Signal
from hetrl.simulator.trace import Recorder

Wire = tuple[str, ...]
BETWEEN_SITES = ("wan out", "wan in", "link")
TRAINING = 0  # the first rank; those of weights follow


@dataclass(frozen=True)
class WireRoute:
    """The wires between two devices with their bytes per second; `link` is (from site, to site) where it leaves one."""

    wires: Mapping[Wire, float]
    delay_seconds: float
    link: tuple[str, str] | None = None


def route(topology: Topology, source: Device, target: Device) -> WireRoute:
    """Return the way from one device to another; HetrlError where two sites have no link."""
    path = topology.path(source, target)
    if path is None:
        raise HetrlError(f"no link between {source.site} and {target.site}, which the plan uses; add it to the links")
    node, other = (topology.node_by_id[d.node_id] for d in (source, target))
    wires: dict[Wire, float | None] = {("lane out", source.id): path.gbps, ("lane in", target.id): path.gbps}
    if source.node_id != target.node_id:
        wires = {("nic out", source.node_id): node.nic_gbps, ("nic in", target.node_id): other.nic_gbps}
    ends, link = None, topology.link(source.site, target.site)
    if source.site != target.site and link is not None:
        ends = (source.site, target.site)
        wires |= {("wan out", source.node_id): node.wan_gbps, ("wan in", target.node_id): other.wan_gbps}
        wires["link", *ends] = link.gbps
    rates = {wire: bytes_per_second(gbps) for wire, gbps in wires.items() if gbps is not None}  # a cap may be none
    return WireRoute(rates, path.delay_ms / 1e3, ends)


def gateway(topology: Topology, devices: Iterable[Device]) -> Device:
    """Return the first best-connected of a site's devices: what crosses between sites crosses there."""
    return max(devices, key=lambda device: topology.node_by_id[device.node_id].reach)


def fair_rates(paths: Sequence[Sequence[Wire]], capacity: Mapping[Wire, float]) -> list[float]:
    """Return the max-min fair rate of each flow; every flow passes at least one wire."""
    flows = defaultdict[Wire, list[int]](list)
    for flow, path in enumerate(paths):
        for wire in path:
            flows[wire].append(flow)
    left, users = dict(capacity), {wire: len(those) for wire, those in flows.items()}
    rates: list[float | None] = [None] * len(paths)
    # What a wire has per open flow never falls while others get their rates: what the heap says of it is at most that.
    heap = [(left[wire] / count, number, wire) for number, (wire, count) in enumerate(users.items())]
    heapq.heapify(heap)
    while heap:
        known, number, tightest = heapq.heappop(heap)
        if not users[tightest]:
            continue
        rate = left[tightest] / users[tightest]
        if rate > known:
            heapq.heappush(heap, (rate, number, tightest))
            continue
        for flow in flows[tightest]:
            if rates[flow] is None:
                rates[flow] = rate
                for wire in paths[flow]:
                    left[wire] = max(left[wire] - rate, 0.0)
                    users[wire] -= 1
    return [rate or 0.0 for rate in rates]


@dataclass(frozen=True)
class Transfer:
    """The last byte has `left` the sender, and a delay later it has `arrived`."""

    left: Signal
    arrived: Signal


@dataclass(eq=False)
class _Flow:
    route: WireRoute
    left: float  # bytes
    done: Signal
    rank: int
    rate: float = 0.0
    since: float = 0.0  # when `left` was true
    turn: int = 0  # an end that was foreseen at an earlier rate is void


@dataclass(eq=False)
class Network:
    """All wires with the flows that are on them."""

    topology: Topology
    clock: Clock
    recorder: Recorder
    carried: defaultdict[tuple[str, str], float] = field(default_factory=lambda: defaultdict(float))  # bytes per link
    _on_wire: defaultdict[Wire, dict[_Flow, None]] = field(default_factory=lambda: defaultdict(dict))
    _routes: dict[tuple[str, str], WireRoute] = field(default_factory=dict)
    _changed: dict[Wire, None] = field(default_factory=dict)  # at this moment

    def send(self, source: Device, target: Device, size: float, name: str, rank: int = 0) -> Transfer:
        """Start a transfer of `size` bytes, which gives way to those of an earlier rank."""
        key = (source.id, target.id)
        if key not in self._routes:
            self._routes[key] = route(self.topology, source, target)
        way, began, transfer = self._routes[key], self.clock.now, Transfer(Signal(), Signal())

        def left() -> None:
            if way.link:
                self.carried[way.link] += size
                self.recorder.on_link(way.link, name, began, self.clock.now - began)
            self.clock.after(way.delay_seconds, transfer.arrived.fire)

        transfer.left.then(left)
        self._change(_Flow(way, size, transfer.left, rank, since=began), joins=True)
        return transfer

    def _change(self, flow: _Flow, joins: bool) -> None:
        """Let a flow join or leave; the rates follow behind all else that happens at this moment."""
        for wire in flow.route.wires:
            if joins:
                self._on_wire[wire][flow] = None
            else:
                del self._on_wire[wire][flow]
        if not self._changed:
            self.clock.after(0.0, self._settle)
        self._changed.update(dict.fromkeys(flow.route.wires))

    def _settle(self) -> None:
        """Give all flows that the changes of this moment bear on their rates."""
        wires, self._changed = self._changed, {}
        seen: dict[Wire, None] = {}
        for wire in wires:
            if wire not in seen and (together := self._together(wire, seen)):
                self._share(together)

    def _together(self, start: Wire, seen: dict[Wire, None]) -> list[_Flow]:
        """Return the flows on a wire and all that share others with them, directly or over others; notes the wires."""
        found: dict[_Flow, None] = {}
        front = [start]
        seen[start] = None
        while front:
            for flow in self._on_wire[front.pop()]:
                if flow not in found:
                    found[flow] = None
                    further = [wire for wire in flow.route.wires if wire not in seen]
                    seen.update(dict.fromkeys(further))
                    front += further
        return list(found)

    def _share(self, together: Sequence[_Flow]) -> None:
        """Give flows that share wires with one another, and with no others, their rates."""
        if len(together) == 1:  # the usual case, at less than the cost of `fair_rates`
            self._go_on(together[0], min(together[0].route.wires.values()))
            return
        capacity = {wire: rate for one in together for wire, rate in one.route.wires.items()}
        for rank in sorted({one.rank for one in together}):
            flows = [one for one in together if one.rank == rank or (rank == TRAINING and one.rank > rank)]
            rates = fair_rates([_competing(one, rank) for one in flows], capacity)
            for one, rate in zip(flows, rates, strict=True):
                if one.rank == rank:
                    self._go_on(one, rate)
                    for wire in one.route.wires:
                        capacity[wire] = max(capacity[wire] - rate, 0.0)

    def _go_on(self, flow: _Flow, rate: float) -> None:
        if rate == flow.rate:
            return
        flow.left = max(flow.left - (self.clock.now - flow.since) * flow.rate, 0.0)
        flow.rate, flow.since, flow.turn = rate, self.clock.now, flow.turn + 1
        turn = flow.turn

        def end() -> None:
            if flow.turn == turn:
                flow.turn += 1
                self._change(flow, joins=False)
                flow.done.fire()

        if rate > 0:
            self.clock.after(flow.left / rate, end)


def _competing(flow: _Flow, rank: int) -> tuple[Wire, ...]:
    """Return the wires on which a flow gets its part with those of this rank: all, of a later rank those in a site."""
    return tuple(wire for wire in flow.route.wires if flow.rank == rank or wire[0] not in BETWEEN_SITES)


class Channel:
    """A connection from one device to another: messages go one after another, in the order of `send`."""

    def __init__(self, network: Network, source: Device, target: Device, name: str, rank: int = 0) -> None:
        """Connect two devices; `name` is what the trace calls the messages."""
        self._network, self._ends, self._name, self._rank = network, (source, target), name, rank
        self._queue: deque[tuple[float, Signal]] = deque()
        self._busy = False

    def send(self, size: float) -> Signal:
        """Queue a message of `size` bytes; the signal fires when it has arrived."""
        arrived = Signal()
        self._queue.append((size, arrived))
        if not self._busy:
            self._next()
        return arrived

    def _next(self) -> None:
        self._busy = bool(self._queue)
        if self._busy:
            size, arrived = self._queue.popleft()
            transfer = self._network.send(*self._ends, size, self._name, self._rank)
            transfer.arrived.then(arrived.fire)
            transfer.left.then(self._next)
