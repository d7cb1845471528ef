"""Tensors on their way to the wire and back: flat, contiguous, in host memory."""

from __future__ import annotations

import torch


def dtype_name(tensor: torch.Tensor) -> str:
    """Return the name of a tensor's element type, as in "bfloat16"."""
    return str(tensor.dtype).removeprefix("torch.")


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a flat CPU tensor, which share its memory."""
    return memoryview(tensor.view(torch.uint8).numpy())  # type: ignore[arg-type]  # torch's stubs know no Buffer


class Staged:
    """A tensor of the caller and `host`, its elements as a flat CPU tensor.

    `host` is the tensor's own memory where that is contiguous on the CPU, and a copy otherwise: in pinned memory for a
    tensor on a GPU, made on the current stream. Without `fill` only its size counts.
    """

    def __init__(self, tensor: torch.Tensor, fill: bool = True) -> None:
        self.tensor = tensor.detach()
        self.on_device = tensor.device.type != "cpu"
        self._copied = self.on_device or not tensor.is_contiguous()
        if not self._copied:
            self.host = self.tensor.view(-1)
            return
        self.host = torch.empty(tensor.numel(), dtype=tensor.dtype, pin_memory=self.on_device)
        if fill:
            self.host.view(tensor.shape).copy_(self.tensor)

    def write_back(self) -> None:
        """Put what `host` holds into the tensor; one on a GPU is written on the current stream."""
        if self._copied:
            self.tensor.copy_(self.host.view(self.tensor.shape))
