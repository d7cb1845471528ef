"""Imports of thousands of modules, as torch, megatron-core and vLLM are, by processes that do nothing before."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Import what is in the block without collecting garbage meanwhile, and never look at it for garbage later.

    Every so many objects Python's collector goes through all there are. Imports make a million of them and next to no
    garbage: modules live as long as the process does (https://docs.python.org/3/library/gc.html#gc.freeze).
    """
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        gc.enable()
