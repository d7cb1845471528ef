"""An operation under way: its handle, as torch.distributed gives it to its callers, and the tensors it works on."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import Work

from hetrl.runtime.wan.element_types import check_carried
from hetrl.runtime.wan.endpoint import GroupError

_NO_TIMEOUT = timedelta(0)


class Staged:
    """A tensor of the caller and `host`, its elements as a flat CPU tensor.

    `host` is the tensor's own memory where that is contiguous on the CPU, and a copy otherwise: in pinned memory for a
    tensor on a GPU, made on the current stream. Without `fill` only its size counts. Raises UsageError for a tensor
    that has no plain memory.
    """

    def __init__(self, tensor: torch.Tensor, fill: bool = True) -> None:
        check_carried(tensor)
        self.tensor = tensor.detach()
        self.on_device = tensor.device.type != "cpu"
        # torch negates and conjugates some tensors when they are read: their memory holds other values.
        self._copied = self.on_device or not tensor.is_contiguous() or tensor.is_neg() or tensor.is_conj()
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


class WanWork(Work):
    """An operation under way; `wait` raises GroupError, and puts results for a GPU there on the current stream."""

    def __init__(self, title: str, future: Future[None], results: Sequence[Staged] = ()) -> None:
        super().__init__()
        self._title, self._future = title, future
        self._results = [staged for staged in results if staged.on_device]
        self._writing = threading.Lock()  # a callback of `get_future` runs in the thread of the endpoint
        self._tensors = [staged.tensor for staged in results]

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Wait for the end; a timeout here leaves the operation running."""
        seconds = timeout.total_seconds()
        try:
            self._future.result(seconds if seconds > 0 else None)
        except TimeoutError:
            raise GroupError(f"wan: {self._title} has not ended within {seconds:g} s") from None
        self._write_back()
        return True

    def _write_back(self) -> None:
        """Put results for a GPU there, once."""
        with self._writing:
            while self._results:
                self._results.pop().write_back()

    def is_completed(self) -> bool:
        """Whether it ended, be it with an error."""
        return self._future.done()

    def is_success(self) -> bool:
        """Whether it ended well."""
        return self._future.done() and self._future.exception() is None

    def exception(self) -> BaseException | None:
        """Return the error of an operation that failed."""
        return self._future.exception() if self._future.done() else None

    def synchronize(self) -> None:
        """Wait for the end."""
        self.wait()

    def result(self) -> list[torch.Tensor]:
        """Return the tensors that the operation wrote."""
        return self._tensors

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a torch future that ends with the operation, its value the tensors that it wrote."""
        future: torch.futures.Future[Any] = torch.futures.Future()

        def settle(ended: Future[None]) -> None:
            try:
                ended.result()
                self._write_back()
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(self._tensors)

        self._future.add_done_callback(settle)
        return future
