"""One rank's shards of a model's tensors: cut from whole tensors, streamed as whole tensors to rank 0."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from hetrl.errors import HetrlError
from hetrl.runtime.megatron import hf_weights
from hetrl.runtime.megatron.hf_weights import Home
from hetrl.runtime.megatron.layout import Coordinates, Layout
from hetrl.workload import Architecture


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
        if tuple(full.shape) != home.shape:
            raise HetrlError(f"weights: {name} has shape {tuple(full.shape)}, config.json says {home.shape}")
        return hf_weights.shard(full, home, self.place.tensor_index, self.layout.tensor)

    @torch.no_grad()
    def take(self, name: str, home: Home, full: torch.Tensor) -> None:
        """Copy this rank's part of a whole tensor into the parameters that hold it, if any."""
        part = self.cut(name, home, full)
        for parameter in filter(None, (home.parameter, home.twin)):
            if parameter in self.parameters:
                hf_weights.write(self.parameters[parameter].data, part, home, self.architecture)

    @torch.no_grad()
    def assemble(self, parameter: str, read: Callable[[str], torch.Tensor]) -> torch.Tensor:
        """Return float32 values of the shape of a parameter of this rank, made of the whole tensors that `read` gives.

        They may be weights or what the optimiser keeps per weight.
        """
        values = torch.zeros(self.parameters[parameter].shape, dtype=torch.float32, device=self.device)
        for name, home in self.homes.items():
            if parameter in (home.parameter, home.twin):
                hf_weights.write(values, self.cut(name, home, read(name)), home, self.architecture)
        return values

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
                full = self._merged(held, home) if self.place.replica == 0 else None
            received = to_rank_0(full, self.layout.rank_of(0, stage, 0), home.shape, dtype, self.device)
            if received is not None:
                yield name, received

    def _merged(self, held: torch.Tensor, home: Home) -> torch.Tensor | None:
        """Gather one tensor of this stage at its first tensor rank, as a copy; None at the others."""
        part = hf_weights.read(held, home, self.architecture)
        if self.layout.tensor == 1 or home.split is None:
            return hf_weights.merge([part], home).clone() if self.place.tensor_index == 0 else None
        first = self.place.tensor_index == 0
        parts = [torch.empty_like(part) for _ in range(self.layout.tensor)] if first else None
        dist.gather(part, parts, group=self.tensor_group, group_dst=0)
        return hf_weights.merge(parts, home) if parts is not None else None


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
