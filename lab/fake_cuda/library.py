"""Compiles guard.cpp against the installed torch, once, and loads it."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.metadata
import importlib.util
import subprocess
import sys
import tempfile
from pathlib import Path

from hetrl.search.core.build import compiler

SOURCE = Path(__file__).with_name("guard.cpp")


def load() -> None:
    """Give torch a CUDA device; before torch is imported, for it asks once.

    Raises RuntimeError where torch is there already or the compiler fails, HetrlError where there is no compiler.
    """
    if "torch" in sys.modules:
        raise RuntimeError("the fake CUDA device must be loaded before torch is imported")
    ctypes.CDLL(str(_built()), ctypes.RTLD_GLOBAL)


def _built() -> Path:
    """Return the library of this source and this torch, compiled if it is not yet."""
    digest = hashlib.sha256(SOURCE.read_bytes() + importlib.metadata.version("torch").encode()).hexdigest()
    path = SOURCE.parent / "__pycache__" / f"guard-{digest[:16]}.so"
    if path.is_file():
        return path
    found = importlib.util.find_spec("torch")
    assert found is not None and found.origin is not None
    torch = Path(found.origin).parent
    include = torch / "include"
    path.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:  # same file system: to be renamed
        made = Path(folder, path.name)
        sources = [f"-I{include}", f"-I{include / 'torch/csrc/api/include'}", str(SOURCE), "-o", str(made)]
        libraries = [f"-L{torch / 'lib'}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{torch / 'lib'}"]
        command = [*compiler(), "-std=c++20", "-shared", "-fPIC", *sources, *libraries]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{SOURCE.name} does not compile: {done.stderr[-2000:]}")
        made.replace(path)
    return path
