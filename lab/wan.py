"""The links between the sites: build wanem, start it, ask it."""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lab.processes import LabError, call
from lab.shape import Site, prefix

SOURCE = Path(__file__).with_name("wanem.c")
SOCKET = "wan.socket"


@dataclass(frozen=True)
class Traffic:
    """What one site sent to another so far: delivered, dropped at a full queue, lost by chance or by a cut."""

    packets: int
    bytes: int
    full: int
    lost: int


def build(directory: Path) -> Path:
    """Compile wanem, unless this source was compiled before, and return the program."""
    program = directory / f"wanem-{hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]}"
    if not program.exists():
        directory.mkdir(parents=True, exist_ok=True)
        unfinished = program.with_suffix(f".{os.getpid()}")
        call(["gcc", "-O2", "-Wall", "-Wextra", "-o", str(unfinished), str(SOURCE)], timeout_seconds=60)
        unfinished.replace(program)
    return program


def site_argument(sites: Mapping[str, Site], site: str, head_pid: int) -> str:
    """Return how wanem is told of a site."""
    return f"{site},/proc/{head_pid}/ns/net,{prefix(sites, site)}.0/24"


def ask(directory: Path, request: str) -> str:
    """Send wanem one request and return its answer."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as client:
        client.settimeout(10)
        client.bind("")  # any abstract address, for the answer
        client.sendto(request.encode(), str(directory / SOCKET))
        return client.recv(65536).decode()


def order(directory: Path, *requests: str) -> None:
    """Send wanem requests that it answers with ok."""
    for request in requests:
        answer = ask(directory, request)
        if answer != "ok":
            raise LabError(f"wanem, asked {request!r}: {answer}")


def stats(directory: Path) -> dict[tuple[str, str], Traffic]:
    """Return the traffic of every directed link, by sender and receiver."""
    rows = [line.split() for line in ask(directory, "stats").splitlines()]
    return {(sender, receiver): Traffic(*map(int, counts)) for sender, receiver, *counts in rows}
