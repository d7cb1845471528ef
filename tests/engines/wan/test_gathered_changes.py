"""Gathers that send what changed: the bits of a plain gather, from fewer bytes, and no wrong base."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from hetrl.errors import HetrlError, UsageError
from hetrl.runtime.wan.gathered_changes import GatheredChanges
from tests.engines.megatron.megatron_worlds import Worlds
from tests.engines.wan.wan_worlds import LAYOUTS, run_sites

_SHARES = (1, 5, 2_300_001)  # the last of several pieces
_DENSITIES = (0.0, 0.01, 0.4, 1.0)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)


def _change(share: torch.Tensor, density: float, generator: torch.Generator) -> None:
    """Give some elements any bits, those of infinities and of NaN among them."""
    width = share.element_size()
    noise = torch.randint(0, 256, (share.numel(), width), generator=generator, dtype=torch.uint8)
    chosen = torch.rand(share.numel(), generator=generator) < density
    _bits(share).view(-1, width)[chosen] = noise[chosen]


def _rounds(rank: int, size: int) -> list[str]:
    """Change one's share, gather it both ways, and compare; return what went wrong."""
    wrong, generator = [], torch.Generator().manual_seed(rank)
    for dtype, share in [(torch.bfloat16, share) for share in _SHARES] + [(torch.float32, 700), (torch.int32, 9)]:
        output = torch.zeros(size, share, dtype=dtype)
        dist.group.WORLD.gather_changes(output)
        for density in _DENSITIES:
            mine = output[rank]
            _change(mine, density, generator)
            plain = torch.empty_like(output)
            dist.all_gather_single(plain, mine.clone())
            dist.all_gather_single(output, mine)
            if not torch.equal(_bits(output), _bits(plain)):
                wrong.append(f"{dtype} of {share}, {density:.0%} changed")
    return wrong


@pytest.mark.parametrize("layout", ["2x2", "3x1", "2+1+1"])
def test_a_gather_of_changes_gives_the_bits_of_a_plain_one(worlds: Worlds, layout: str) -> None:
    assert run_sites(worlds, layout, "wan", _rounds) == [[]] * len(LAYOUTS[layout])


_SHARE = 3_000_000


def _step(rank: int, size: int) -> int:
    """Gather twice, then do what a sharded optimiser does in one step; return the bytes of the gradients."""
    parameters = torch.zeros(size, _SHARE, dtype=torch.bfloat16)
    dist.group.WORLD.gather_changes(parameters)
    gradients = torch.randn(size, _SHARE, generator=torch.Generator().manual_seed(rank)).bfloat16()
    for _ in range(2):
        _change(parameters[rank], 0.02, torch.Generator().manual_seed(rank))
        dist.all_gather_single(parameters, parameters[rank])
    dist.reduce_scatter_single(gradients[rank].clone(), gradients)
    return gradients.nbytes


def test_an_optimiser_step_sends_little_more_than_half_the_gradients_packed(worlds: Worlds) -> None:
    crossed: dict[str, int] = {}
    gradients, _ = run_sites(worlds, "2x1", "wan", _step, crossed)
    first_gather, packed_share, changes = 0.5 * gradients, 0.5 * gradients * 0.68, 0.04 * gradients
    for sent in crossed.values():
        assert 0.25 * gradients <= sent - first_gather <= packed_share + changes


def _wrong_base(rank: int, size: int) -> str:
    output = torch.zeros(size, 1000)
    dist.group.WORLD.gather_changes(output)
    for turn in range(2):
        output[rank, turn] = rank + 1.0
        dist.all_gather_single(output, output[rank])
    assert output[:, :2].T.tolist() == [[other + 1.0 for other in range(size)]] * 2
    if rank == 0:
        output[1, 7] = 5.0  # a share of the other site
    try:
        dist.all_gather_single(output, output[rank])
        dist.barrier()
    except HetrlError as error:
        return str(error)
    return "nothing"


def test_a_wrong_base_ends_the_group_on_every_rank(worlds: Worlds) -> None:
    for said in run_sites(worlds, "2x2", "wan", _wrong_base):
        assert "the changes of beta/actor_training.rank/0 do not lead to its values from those held here" in said
        assert "rank 0 (alpha/actor_training.rank/0, site alpha)" in said


def _loaded(rank: int, size: int) -> bool:
    """Take other values from elsewhere, which every rank says."""
    output = torch.zeros(size, 1000)
    for load in range(2):
        output[:] = torch.arange(1000.0) + load * (rank + 1)
        dist.group.WORLD.gather_changes(output)
        dist.all_gather_single(output, output[rank])
    return torch.equal(output, torch.arange(1000.0) + torch.arange(1.0, size + 1)[:, None])


def test_values_from_elsewhere_are_gathered_whole(worlds: Worlds) -> None:
    assert run_sites(worlds, "2x1", "wan", _loaded) == [True, True]


def test_types_without_changes_are_named() -> None:
    with pytest.raises(UsageError, match="changes of torch.int8 are not gathered"):
        GatheredChanges(torch.zeros(2, dtype=torch.int8))
