"""What tests ask a lab: who reaches whom, and how fast."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from lab.lab import Lab

LISTEN = """
import socket, sys
server = socket.create_server(("", int(sys.argv[1])))
print("listening", flush=True)
while True:
    server.accept()[0].sendall(b"hello")
"""
CONNECT = """
import socket, sys
with socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=float(sys.argv[3])) as connection:
    sys.exit(connection.recv(5) != b"hello")
"""


@contextmanager
def listening(lab: Lab, node: str, *argv: str) -> Iterator[None]:
    """Run a server that prints a line with `listening` when it listens."""
    server = lab.popen(node, argv, stdout=subprocess.PIPE)
    try:
        assert server.stdout
        assert any("listening" in line for line in server.stdout), f"{argv} ended"
        yield
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.communicate()


def reaches(lab: Lab, sender: str, receiver: str, port: int, seconds: float) -> bool:
    with listening(lab, receiver, sys.executable, "-c", LISTEN, str(port)):
        connect = [sys.executable, "-c", CONNECT, receiver, str(port), str(seconds)]
        return lab.run(sender, connect, check=False).returncode == 0


def ping(lab: Lab, sender: str, receiver: str, *options: str) -> tuple[int, list[float]]:
    """Return how many of the pings were answered, and the round trips in milliseconds."""
    answer = lab.run(sender, ["ping", "-W", "2", *options, receiver], user="root", check=False).stdout
    round_trips_ms = [float(found) for found in re.findall(r"time=([\d.]+) ms", answer)]
    received = re.search(r"(\d+) received", answer)
    assert received, answer
    return int(received[1]), round_trips_ms
