"""The cost model as a value: what is predicted follows from the sites, the job and the efficiencies of the GPUs."""

from __future__ import annotations

from dataclasses import dataclass, field

from hetrl.cost.efficiency import Efficiencies, Rates, calibrated
from hetrl.hardware import Topology
from hetrl.workload import Workload

GATHERED = 1.0  # all of them: the runtime gathers whole parameters


@dataclass(frozen=True, eq=False)
class CostModel:
    """A topology and a workload, with the efficiencies that predictions rest on; calibrated ones unless given.

    `gathered` is the share of its parameters' bytes that a sharded optimiser sends over links behind an update.
    """

    topology: Topology
    workload: Workload
    efficiencies: Efficiencies = field(default_factory=calibrated)
    gathered: float = GATHERED

    def rates(self, device: str) -> Rates:
        """Return the effective rates of a device."""
        return self.efficiencies.rates(self.topology.device_by_id[device].gpu)
