"""When Python's collector looks for garbage in cycles: never during imports, seldom where messages come and go."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

# Cycles of so many objects are some megabytes. The whole is looked at after 25 times as many that live on.
_OBJECTS, _LOOKS, _LONGER_LOOKS = 50_000, 5, 5


@contextmanager
def uncollected() -> Iterator[None]:
    """Import what is in the block without collecting garbage meanwhile, and never look at it for garbage later.

    Every so many objects Python's collector goes through all there are. Imports of thousands of modules, as torch,
    megatron-core and vLLM are, make a million of them and next to no garbage: modules live as long as the process does
    (https://docs.python.org/3/library/gc.html#gc.freeze).
    """
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        gc.enable()


def collect_rarely() -> None:
    """Look for garbage every 50,000 objects instead of every 700, and never at what is there by now.

    What a process of messages makes, such as samples under way, lives on for a while and is seldom part of a cycle.
    Looking through it all again and again was nearly half of the work of a controller of a thousand ranks.
    """
    gc.freeze()
    gc.set_threshold(_OBJECTS, _LOOKS, _LONGER_LOOKS)
