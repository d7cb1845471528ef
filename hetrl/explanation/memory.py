"""What fills the memory of each GPU: what its tasks keep there, and the most that one of them needs while it runs."""

from __future__ import annotations

from dataclasses import dataclass

from hetrl.cost.memory import Footprint, device_footprints
from hetrl.cost.model import CostModel
from hetrl.plan.plan import Plan


@dataclass(frozen=True)
class Share:
    """GB that a task keeps on a device (`resident`) or needs while it runs."""

    task: str
    gb: float
    resident: bool


@dataclass(frozen=True)
class Memory:
    """Devices of one site and type that are filled alike."""

    site: str
    gpu: str
    devices: tuple[str, ...]
    usable_gb: float
    shares: tuple[Share, ...]

    @property
    def peak_gb(self) -> float:
        """Return all shares together."""
        return sum(share.gb for share in self.shares)


def memory(plan: Plan, model: CostModel) -> tuple[Memory, ...]:
    """Return the memory of the devices in use, those that are filled alike together, in the order of the topology."""
    needs = device_footprints(plan, model)
    alike: dict[tuple[str, str, tuple[Share, ...]], list[str]] = {}
    for found in (found for found in model.topology.devices if found.id in needs):
        alike.setdefault((found.site, found.gpu, tuple(_shares(needs[found.id]))), []).append(found.id)
    return tuple(
        Memory(site, gpu, tuple(devices), model.efficiencies.rates(gpu).usable_gb, shares)
        for (site, gpu, shares), devices in alike.items()
    )


def _shares(needs: dict[str, Footprint]) -> list[Share]:
    kept = [Share(name, need.resident_gb, True) for name, need in needs.items() if need.resident_gb > 0]
    largest = max(needs, key=lambda name: needs[name].active_gb)
    return [*kept, Share(largest, needs[largest].active_gb, False)]
