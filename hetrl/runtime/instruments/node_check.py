"""Look at a node as a run's processes find it: `python -m hetrl.runtime.instruments.node_check ASKED`, both are JSON.

It prints one line that begins with MARK. It imports nothing but Python: what may be missing is what it looks for.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from importlib import metadata
from pathlib import Path

MARK = "hetrl found: "
CONNECT_SECONDS = 5.0


def look(asked: dict[str, object]) -> dict[str, object]:
    """Return what is there of what is asked for.

    `packages` are names; `models` and `data` paths, of which those that cannot be read come back; `interface` is that
    of a network; `knock` a host:port; `gpus` says whether torch shall count them.
    """
    interface, knock = str(asked.get("interface") or ""), str(asked.get("knock") or "")
    return {
        "host": socket.gethostname(),
        "python": sys.version.split()[0],
        "packages": {name: _version(name) for name in _words(asked, "packages")},
        "models": [path for path in _words(asked, "models") if not _readable(Path(path) / "config.json")],
        "data": [path for path in _words(asked, "data") if not _readable(Path(path))],
        "interfaces": [] if not interface else sorted(name for _, name in socket.if_nameindex()),
        "knock": _knock(knock) if knock else "",
        "granted": len([gpu for gpu in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu]),
        "seen": _gpus() if asked.get("gpus") else None,
    }


def _words(asked: dict[str, object], key: str) -> list[str]:
    found = asked.get(key)
    return [str(word) for word in found] if isinstance(found, list) else []


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _readable(path: Path) -> bool:
    return os.access(path, os.R_OK)


def _knock(target: str) -> str:
    """Return why nobody answers at host:port, nothing where somebody does."""
    host, _, port = target.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
    except OSError as error:
        return str(error) or type(error).__name__
    return ""


def _gpus() -> int | str:
    """Return how many GPUs torch sees, or why it sees none."""
    try:
        import torch

        return int(torch.cuda.device_count())
    except Exception as error:  # whatever a driver or a library that is missing raises
        return f"{type(error).__name__}: {error}".splitlines()[0]


if __name__ == "__main__":
    print(MARK + json.dumps(look(json.loads(sys.argv[1]))), flush=True)
