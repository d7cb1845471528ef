"""Compilation of the evaluator, kept on disk between runs."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numba
from numba.core import config, types

Function = TypeVar("Function", bound=Callable[..., Any])


def njit(function: Function) -> Function:
    """Compile a function when it is first called, or load it as compiled before.

    Numba's own cache looks only at the file that a function stands in, and serves a stale caller where a function that
    it calls in another file has changed. So the cache is one directory per state of all the sources that use it.

    A literal argument (`below(state, 8)`) is taken for its type: numba would compile the function for each of them.
    """
    dispatcher = numba.njit(error_model="numpy")(function)  # division by zero is infinite: half the code of raising
    specialise = dispatcher.get_call_template
    dispatcher.get_call_template = lambda args, kws: specialise(tuple(map(types.unliteral, args)), kws)
    before, config.CACHE_DIR = config.CACHE_DIR, _directory()
    try:
        dispatcher.enable_caching()
    finally:
        config.CACHE_DIR = before
    return dispatcher  # type: ignore[no-any-return]


@cache
def _directory() -> str:
    """Return the first place that can be written: beside the sources, the user's cache, a temporary directory.

    What whoever installed hetrl has compiled beside the sources is copied for a user who may only read there.
    """
    here = Path(__file__).parent
    digest = hashlib.sha256()
    for path in sorted(here.glob("*.py")):
        source = path.read_bytes()
        digest.update(source if b"search.jit import" in source else b"")
    name = f"compiled-{digest.hexdigest()[:16]}"
    shared = here / "__pycache__" / name
    own = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hetrl" / name
    for place in (shared, own):
        with suppress(OSError):
            place.mkdir(parents=True, exist_ok=True)
        if os.access(place, os.W_OK):
            if place == own and shared.is_dir() and not any(own.iterdir()):
                shutil.copytree(shared, own, dirs_exist_ok=True)
            return str(place)
    return tempfile.mkdtemp(prefix="hetrl-compiled-")
