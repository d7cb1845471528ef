"""The cost model as a value: what is predicted follows from the sites, the job and the efficiencies of the GPUs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from hetrl.cost.efficiency import Efficiencies, Rates, calibrated
from hetrl.hardware import Topology
from hetrl.workload import Workload

# Shares of their bytes that cross links, by the bytes of a number: docs/decisions.md, "Changed words travel as gaps and
# steps" (1.2 % of bf16 parameters change: 1/123; all of fp32: 1/2.8) and "Sums of bf16 are packed".
GATHERED: Mapping[int, float] = MappingProxyType({2: 0.01, 4: 0.4})
PACKED: Mapping[int, float] = MappingProxyType({2: 2 / 3, 4: 1.0})


@dataclass(frozen=True, eq=False)
class CostModel:
    """A topology and a workload, with the efficiencies that predictions rest on; calibrated ones unless given.

    `gathered` is the share of its parameters' bytes that a sharded optimiser sends over links behind an update, by the
    bytes of a parameter.
    """

    topology: Topology
    workload: Workload
    efficiencies: Efficiencies = field(default_factory=calibrated)
    gathered: Mapping[int, float] = field(default_factory=lambda: dict(GATHERED))  # a proxy goes to no other process

    def rates(self, device: str) -> Rates:
        """Return the effective rates of a device."""
        return self.efficiencies.rates(self.topology.device_by_id[device].gpu)
