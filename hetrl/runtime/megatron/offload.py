"""What an engine keeps on its device, moved to the host's memory and back: `idle_state: offload` of a plan.

Storages are emptied in place, so that whatever is a view of one survives: megatron's parameters are views of a buffer,
its float32 main weights of the parameters. Megatron's own `offload_to_cpu` cuts these ties for float32 models, copies
the optimiser's state through memory that is not pinned, and does nothing without CUDA.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel

from hetrl.runtime.megatron.snapshot import HostBytes


class Offload:
    """The state of one engine; `leave` and `come_back` alternate."""

    def __init__(self) -> None:
        """Start awake."""
        self._kept: list[torch.Tensor] = []  # flat, as bytes; each is a whole storage
        self._dropped: list[tuple[torch.UntypedStorage, int]] = []
        self._host = HostBytes()

    @property
    def away(self) -> bool:
        """Return whether the state is on the host."""
        return bool(self._kept)

    @property
    def host_bytes(self) -> int:
        """Return what the host holds of it."""
        return self._host.held_bytes

    @torch.no_grad()
    def leave(self, model: torch.nn.Module, optimizer: Any) -> None:
        """Copy weights and optimiser state to the host; free them, and the gradients, on the device.

        `model` is megatron's, inside its DistributedDataParallel where there is an `optimizer` (else None).
        """
        self._kept = [tensor.view(-1).view(torch.uint8) for tensor in _whole(_state(model, optimizer))]
        gradients = _gradients(model)
        self._dropped = [(storage, storage.nbytes()) for storage in gradients]
        for one in self._kept:
            self._host.add(one)
        _wait()
        for storage in (*(one.untyped_storage() for one in self._kept), *gradients):
            storage.resize_(0)
        release()

    @torch.no_grad()
    def come_back(self) -> None:
        """Take the state back to the device; gradients are undefined until a step makes them."""
        sizes = [(one.untyped_storage(), one.numel()) for one in self._kept]
        for storage, size in (*sizes, *self._dropped):
            storage.resize_(size)
        for one, start in zip(self._kept, self._starts(), strict=True):
            self._host.copy_to(one, start)
        _wait()
        self._kept, self._dropped, self._host = [], [], HostBytes()

    @contextmanager
    def at_hand(self, tensor: torch.Tensor) -> Iterator[torch.Tensor]:
        """Give what a tensor of the state holds, to be read and changed: itself, or what the host has of it meanwhile.

        Away, it must be the first that its storage holds, as each parameter of a model without optimiser is.
        """
        if not self.away:
            yield tensor
            return
        storage = tensor.untyped_storage()._cdata
        starts = zip(self._kept, self._starts(), strict=True)
        start = next(start for one, start in starts if one.untyped_storage()._cdata == storage)
        values = torch.empty(tensor.shape, dtype=tensor.dtype)
        flat = values.view(-1).view(torch.uint8)
        self._host.copy_to(flat, start)
        yield values
        self._host.put(flat, start)

    def _starts(self) -> Iterator[int]:
        """Yield where the host has each storage."""
        start = 0
        for one in self._kept:
            yield start
            start += one.numel()


def _buffers(model: torch.nn.Module) -> list[Any]:
    """Return megatron's buffers of gradients, which may hold the parameters, too."""
    return list(model.buffers) if isinstance(model, DistributedDataParallel) else []


def _gradients(model: torch.nn.Module) -> list[torch.UntypedStorage]:
    return [buffer.grad_data.untyped_storage() for buffer in _buffers(model)]


def _state(model: torch.nn.Module, optimizer: Any) -> Iterator[torch.Tensor]:
    """Yield weights and optimiser state, what holds others' views before these."""
    yield from (buffer.param_data for buffer in _buffers(model) if buffer.param_data is not None)
    yield from (parameter.data for parameter in model.parameters())
    for part in optimizer.chained_optimizers if optimizer is not None else ():
        for group in part.optimizer.param_groups:
            for main in group["params"]:
                yield main.data
                yield from (value for value in part.optimizer.state[main].values() if torch.is_tensor(value))


def _whole(tensors: Iterator[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield one tensor of every storage, the first, which is all of it."""
    seen = set()
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage._cdata not in seen and storage.nbytes():
            seen.add(storage._cdata)
            assert tensor.numel() * tensor.itemsize == storage.nbytes(), "a view came before what it is a view of"
            yield tensor


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def release() -> None:
    """Give what torch has kept on the device for later use to the other processes there."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
