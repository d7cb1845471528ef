"""One rank's shards of a model's tensors: cut from whole tensors, streamed as whole tensors to rank 0."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from hetrl.errors import HetrlError
from hetrl.runtime.megatron import hf_weights, slices
from hetrl.runtime.megatron.hf_weights import Home
from hetrl.runtime.megatron.layout import Coordinates, Layout
from hetrl.runtime.megatron.slices import Box
from hetrl.workload import Architecture

AtHand = Callable[[torch.Tensor], AbstractContextManager[torch.Tensor]]


class Source(Protocol):
    """Something that has whole tensors under their Hugging Face names and gives parts of them."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a whole tensor."""

    def read(self, name: str, box: Box) -> torch.Tensor:
        """Return the part of a tensor in a box, on the CPU."""


@dataclass(frozen=True, eq=False)
class Shards:
    """What the rank at `place` holds: `parameters` under megatron's names with global layer indices.

    `homes` says where each Hugging Face tensor of the whole model lives.
    """

    architecture: Architecture
    layout: Layout
    place: Coordinates
    homes: Mapping[str, Home]
    parameters: Mapping[str, torch.nn.Parameter]
    tensor_group: dist.ProcessGroup
    device: torch.device

    def cut(self, name: str, home: Home, full: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a whole tensor; HetrlError when its shape is not that of the model."""
        check_shape(name, home, full.shape)
        return hf_weights.shard(full, home, self.place.tensor_index, self.layout.tensor)

    @torch.no_grad()
    def take(self, tensors: Iterable[tuple[str, torch.Tensor]], at_hand: AtHand) -> None:
        """Copy this rank's parts of all of a model's whole tensors, in any order, into the parameters that hold them.

        `at_hand` gives what a parameter holds, to be changed, wherever that is. Raises HetrlError for missing, surplus
        or misshapen tensors; what a tied model or an old checkpoint stores twice is passed over.
        """
        arrived: set[str] = set()
        for name, full in tensors:
            if hf_weights.passed_over(name, self.homes):
                continue
            arrived.add(name)
            if name in self.homes:
                self._take(name, self.homes[name], full, at_hand)
        hf_weights.missing_and_surplus(arrived, self.homes)

    def _take(self, name: str, home: Home, full: torch.Tensor, at_hand: AtHand) -> None:
        part = self.cut(name, home, full)
        for parameter in filter(None, (home.parameter, home.twin)):
            if parameter in self.parameters:
                with at_hand(self.parameters[parameter].data) as values:
                    hf_weights.write(values, part, home, self.architecture)

    @torch.no_grad()
    def fill(self, values: torch.Tensor, parameter: str, source: Source) -> None:
        """Write what `source` has of a parameter of this rank into `values`, which has the parameter's shape.

        Only this rank's part of each tensor is read. They may be weights or what the optimiser keeps per weight. Raises
        HetrlError when a shape is not that of the model.
        """
        for name, home in self.homes_of(parameter):
            check_shape(name, home, source.shape(name))
            hf_weights.write(values, source.read(name, self.box_of(home)), home, self.architecture)

    def homes_of(self, parameter: str) -> list[tuple[str, Home]]:
        """Return the Hugging Face tensors that live in a parameter."""
        return [(name, home) for name, home in self.homes.items() if parameter in (home.parameter, home.twin)]

    def box_of(self, home: Home) -> Box:
        """Return which part of a whole tensor this rank holds, where its stage has the tensor."""
        return hf_weights.box_of(home, self.place.tensor_index, self.layout.tensor)

    def part(self, home: Home, parameter: str, start: int, stop: int) -> tuple[list[tuple[int, int]], list[Box]]:
        """Return where elements `start`..`stop` of a flattened parameter of this rank stand in one of its tensors.

        These are ranges of the flattened parameter, and the boxes of the tensor that their elements fill, in order.
        """
        held = self.box_of(home)
        runs = hf_weights.runs(home, held, self.parameters[parameter].shape, self.architecture)
        filled = slices.boxes(runs.before(start), runs.before(stop), slices.shape_of(held))
        return list(runs.within(start, stop)), [slices.inside(box, held) for box in filled]

    @torch.no_grad()
    def stream(self, values: Callable[[str], torch.Tensor], dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield whole tensors in the order of the layers on rank 0, contiguous on the CPU, one at a time.

        `values` gives what this rank holds for one of its parameters, in the parameter's shape and `dtype`; it is
        called on every replica, and the first one's answer counts. Collective: the other ranks iterate too and get
        nothing.
        """
        for name, home in self.homes.items():
            stage, full = hf_weights.stage_of(home, self.layout), None
            if self.place.stage == stage:
                held = values(home.parameter)
                full = self.merged(held, home) if self.place.replica == 0 else None
            received = to_rank_0(full, self.layout.rank_of(0, stage, 0), home.shape, dtype, self.device)
            if received is not None:
                yield name, received

    def merged(self, held: torch.Tensor, home: Home, at: int = 0) -> torch.Tensor | None:
        """Gather one tensor of this stage at one of its tensor ranks, as a copy; None at the others (collective)."""
        part = hf_weights.read(held, home, self.architecture)
        if self.layout.tensor == 1 or home.split is None:
            return hf_weights.merge([part], home).clone() if self.place.tensor_index == at else None
        parts = [torch.empty_like(part) for _ in range(self.layout.tensor)] if self.place.tensor_index == at else None
        dist.gather(part, parts, group=self.tensor_group, group_dst=at)
        return hf_weights.merge(parts, home) if parts is not None else None


def check_shape(name: str, home: Home, shape: Sequence[int]) -> None:
    """Raise HetrlError when a tensor has not the shape that the model's configuration says."""
    if tuple(shape) != home.shape:
        raise HetrlError(f"weights: {name} has shape {tuple(shape)}, config.json says {home.shape}")


def to_rank_0(
    tensor: torch.Tensor | None, source: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> torch.Tensor | None:
    """Move a tensor of rank `source` to the host memory of rank 0, which gets it; None elsewhere."""
    rank = dist.get_rank()
    if rank == source and tensor is not None and source != 0:
        dist.send(tensor.contiguous(), 0)
    if rank != 0:
        return None
    if source != 0:
        tensor = torch.empty(shape, dtype=dtype, device=device)
        dist.recv(tensor, source)
    assert tensor is not None
    return tensor.cpu()
