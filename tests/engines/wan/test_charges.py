"""What the cost model charges a reduction over sites is what the gateways count."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from hetrl.cost.network import Ring, wan_reduction_bytes
from hetrl.hardware import Device
from hetrl.runtime import wire
from tests.engines.megatron.megatron_worlds import Worlds
from tests.engines.wan.wan_worlds import LAYOUTS, run_sites

NUMBERS = 6 * 2**20  # two pieces of 4 MiB for each of three sites
SLACK_BYTES = 300_000  # headers, acknowledgements, the meeting and the barrier


def _sharded(rank: int, size: int) -> None:
    """Reduce and gather as a sharded optimiser does."""
    gradient = torch.ones(NUMBERS)
    parameters, share = torch.empty(NUMBERS, dtype=torch.bfloat16), torch.empty(NUMBERS // size)
    dist.reduce_scatter_single(share, gradient)
    dist.all_gather_single(parameters, share.to(torch.bfloat16))


def _whole(rank: int, size: int) -> None:
    """Reduce as replicas do that each keep the whole optimiser."""
    dist.all_reduce(torch.ones(NUMBERS))


@pytest.mark.parametrize("layout", ["2x2", "2x1", "3x1", "2+1+1"])
@pytest.mark.parametrize("sharded", [True, False])
def test_the_bytes_per_direction_are_those_of_the_links(worlds: Worlds, layout: str, sharded: bool) -> None:
    crossed: dict[str, int] = {}
    run_sites(worlds, layout, "wan", _sharded if sharded else _whole, crossed)
    devices = tuple(Device(wire.site_of(rank), "n0", number, "cpu") for number, rank in enumerate(LAYOUTS[layout]))
    charged = wan_reduction_bytes([Ring(devices, 4.0 * NUMBERS, 2.0 * NUMBERS, sharded)])
    assert {f"{source}-{target}" for source, target in charged} == crossed.keys()
    for (source, target), expected in charged.items():
        assert expected <= crossed[f"{source}-{target}"] <= 1.01 * expected + SLACK_BYTES
