"""Compiles the core, `hetrl/search/cpp`, once per machine; what is compiled is kept beside the sources.

Any C++17 compiler will do: `$CXX`, one in the PATH, or the one that `pip install ziglang` brings.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from hetrl.errors import HetrlError

SOURCES = Path(__file__).parents[1] / "cpp"
COMPILERS = ("c++", "g++", "clang++")
# No contraction to fused operations: the same seed gives the same plan on every machine. What is exported is inlined
# like the rest (no interposition), and so are roots (no errno).
OPTIMISED = ("-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-semantic-interposition")
FLAGS = ("-std=c++17", *OPTIMISED, "-fvisibility=hidden", "-shared", "-fPIC")
CHECKED = "HETRL_CHECKED"  # set in the environment: every index is checked (slow; for tests)


def load(header: str) -> ctypes.CDLL:
    """Return the core with this records.h, compiled if it is not yet.

    Raises HetrlError where there is no compiler, where it fails, or where what it made cannot be loaded.
    """
    flags = (*FLAGS, f"-D{CHECKED}") if os.environ.get(CHECKED) else FLAGS
    name = _name(header, flags)
    places = (SOURCES / "__pycache__", _user_cache())
    found = next((place / name for place in places if (place / name).is_file()), None)
    path = found or _compile(header, flags, _writable(places) / name)
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise HetrlError(f"{path}: {error}; it was compiled for another machine? Remove it and try again.") from error


def _name(header: str, flags: tuple[str, ...]) -> str:
    """Return the file of these sources: another state of them, or another kind of machine, has another file."""
    digest = hashlib.sha256(" ".join([platform.machine(), *flags, header]).encode())
    for path in sorted(SOURCES.iterdir()):
        if path.is_file():
            digest.update(path.read_bytes())
    return f"core-{digest.hexdigest()[:16]}.so"


def _user_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hetrl"


def _writable(places: tuple[Path, ...]) -> Path:
    """Return the first place that can be written; a temporary directory where none can."""
    for place in places:
        with suppress(OSError):
            place.mkdir(parents=True, exist_ok=True)
        if os.access(place, os.W_OK):
            return place
    return Path(tempfile.mkdtemp(prefix="hetrl-core-"))


def compiler() -> list[str]:
    """Return the command of a C++ compiler. Raises HetrlError where there is none."""
    if named := os.environ.get("CXX"):
        return shlex.split(named)
    for name in COMPILERS:
        if found := shutil.which(name):
            return [found]
    if importlib.util.find_spec("ziglang"):
        return [sys.executable, "-m", "ziglang", "c++"]
    raise HetrlError(
        f"the search is compiled when it is first used, and there is no C++ compiler (tried: {', '.join(COMPILERS)}). "
        "Load one (`module load gcc`), name one with CXX=..., or `pip install ziglang`."
    )


def _compile(header: str, flags: tuple[str, ...], target: Path) -> Path:
    command = compiler()
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="core-") as folder:  # same file system: to be renamed
        made = Path(folder, target.name)
        Path(folder, "records.h").write_text(header)
        whole = [*command, *flags, f"-I{SOURCES}", f"-I{folder}", str(SOURCES / "search.cpp"), "-o", str(made)]
        try:
            done = subprocess.run(whole, capture_output=True, text=True, check=False)
        except OSError as error:
            raise HetrlError(f"{command[0]}: {error.strerror}; name a C++ compiler with CXX=...") from error
        if done.returncode != 0:
            lines = done.stderr.strip().splitlines()
            first = next((line for line in lines if "error" in line), lines[-1] if lines else "no message")
            raise HetrlError(f"`{shlex.join(command)}` does not compile the search (C++17): {first}")
        made.replace(target)
    return target
