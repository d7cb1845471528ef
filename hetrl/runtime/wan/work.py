"""The handle of an operation under way, as torch.distributed gives it to its callers."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import Work

from hetrl.runtime.wan.endpoint import GroupError
from hetrl.runtime.wan.tensors import Staged

_NO_TIMEOUT = timedelta(0)


class WanWork(Work):
    """An operation under way; `wait` raises GroupError, and puts results for a GPU there on the current stream."""

    def __init__(self, title: str, future: Future[None], results: Sequence[Staged] = ()) -> None:
        super().__init__()
        self._title, self._future = title, future
        self._results = [staged for staged in results if staged.on_device]
        self._tensors = [staged.tensor for staged in results]

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Wait for the end; a timeout here leaves the operation running."""
        seconds = timeout.total_seconds()
        try:
            self._future.result(seconds if seconds > 0 else None)
        except TimeoutError:
            raise GroupError(f"wan: {self._title} has not ended within {seconds:g} s") from None
        while self._results:
            self._results.pop().write_back()
        return True

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
            error = ended.exception()
            if error is None:
                future.set_result(self._tensors)
            else:
                future.set_exception(error)

        self._future.add_done_callback(settle)
        return future
