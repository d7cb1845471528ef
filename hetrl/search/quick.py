"""A fast estimate that only ranks training grids, so that the full model is asked about the best few.

It keeps the terms that decide: FLOPs over the devices' sum, the pipeline's bubble, tensor-parallel traffic, hops and
gradients over slow links. It leaves out the exact layer split, memory beyond the optimiser's state, and latencies
inside a site. No plan is ever valued by it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from hetrl.cost.efficiency import rates
from hetrl.hardware import gpu_type
from hetrl.search.space import Space
from hetrl.workload import Architecture

Kinds = tuple[int, ...]  # the device class of each stage of a replica


@dataclass(frozen=True, eq=False)
class Quick:
    """Estimates the seconds of one iteration's training for grids of device classes."""

    model: Architecture
    space: Space

    @cached_property
    def _flops(self) -> list[float]:
        return [rates(kind.gpu).training_flops for kind in self.space.classes]

    @cached_property
    def _usable_gb(self) -> list[float]:
        return [rates(kind.gpu).usable_gb for kind in self.space.classes]

    @cached_property
    def _peer_gbps(self) -> list[float]:
        nodes = self.space.problem.topology.node_by_id
        first = [members[0][0] for members in self.space.nodes]
        return [nodes[f"{d.site}/{d.node}"].peer_gbps or gpu_type(d.gpu).peer_gbps for d in first]

    @cached_property
    def _links(self) -> list[list[tuple[float, float] | None]]:
        """Return gbps and delay in seconds between the sites of two classes; None inside a site."""
        return [[self._link(a.site, b.site) for b in self.space.classes] for a in self.space.classes]

    def _link(self, site: str, other: str) -> tuple[float, float] | None:
        if site == other:
            return None
        link = self.space.problem.topology.link(site, other)
        return (link.gbps, link.delay_ms / 1e3) if link and link.gbps > 0 else (1e-9, 1e9)

    def seconds(self, columns: Mapping[Kinds, int], tensor: int) -> float:
        """Return the estimate for so many replicas of each column of classes, `tensor` ranks per stage.

        Infinite where the optimiser's state alone does not fit.
        """
        workload, stages, replicas = self.space.problem.workload, len(next(iter(columns))), sum(columns.values())
        usable = min(self._usable_gb[kind] for column in columns for kind in column)
        if self.model.parameters / stages / tensor * (6 + 12 / replicas) / 1e9 > 1.5 * usable:  # stages may be unequal
            return float("inf")
        tokens = workload.samples * workload.sequence_tokens * workload.epochs
        steps = workload.optimizer_steps_per_iteration
        micro_batches = max(workload.samples * workload.epochs / steps / replicas, 1.0)
        busy = self._compute(columns, tensor, tokens) + self._tensor_traffic(columns, tensor, tokens / replicas)
        busy *= (micro_batches + stages - 1) / micro_batches
        hops = self._hops(columns, tokens, micro_batches * steps)
        return max(busy, hops) + steps * self._reduction(list(columns))

    def _compute(self, columns: Mapping[Kinds, int], tensor: int, tokens: float) -> float:
        """Return the FLOPs over the mean of what the slowest stages allow and what all devices have."""
        model, speed = self.model, 0.0
        for column, count in columns.items():
            flops = [self._flops[kind] for kind in column]
            speed += count * (len(flops) * min(flops) + sum(flops)) / 2
        parameters = model.layers * model.layer_matrix_parameters + model.head_parameters
        return 6 * parameters * tokens / (tensor * speed)

    def _tensor_traffic(self, columns: Mapping[Kinds, int], tensor: int, tokens: float) -> float:
        if tensor == 1:
            return 0.0
        slowest = min(self._peer_gbps[kind] for column in columns for kind in column)
        layers = self.model.layers / len(next(iter(columns)))
        moved = 4 * layers * tokens * self.model.hidden * self.space.problem.workload.weight_bytes
        return 2 * (tensor - 1) / tensor * moved * 8 / (slowest * 1e9)

    def _hops(self, columns: Mapping[Kinds, int], tokens: float, micro_batches: float) -> float:
        """Return the slower of: activations over the busiest link; round trips shared by those in flight."""
        loads: Counter[float] = Counter()
        waiting = 0.0
        replicas = sum(columns.values())
        for column, count in columns.items():
            delay = 0.0
            for kind, following in pairwise(column):
                link = self._links[kind][following]
                if link is not None:
                    loads[link[0]] += count
                    delay += 2 * link[1]
            waiting = max(waiting, micro_batches * delay / len(column))
        moved = tokens / replicas * self.model.hidden * self.space.problem.workload.weight_bytes
        return max([waiting, *(moved * count * 8 / (gbps * 1e9) for gbps, count in loads.items())])

    def _reduction(self, columns: list[Kinds]) -> float:
        """Return the time of the fp32 gradients over the slowest link that a stage's replicas span."""
        worst = 0.0
        for stage in zip(*columns, strict=True):
            sites = list({self.space.classes[kind].site: kind for kind in stage}.values())
            for kind, other in zip(sites, [*sites[1:], sites[0]], strict=True):
                link = self._links[kind][other]
                if link is not None:
                    gradients = self.model.parameters / len(columns[0]) * 4
                    worst = max(worst, 2 * (len(sites) - 1) / len(sites) * gradients * 8 / (link[0] * 1e9))
        return worst
