"""The sockets of gateways and members outlive what becomes of their peers."""

from __future__ import annotations

import subprocess
import sys

# Its own process: what ZeroMQ asserts ends one. The peer goes while more waits than its socket's queue holds, and the
# reader looks away for longer than any timer of the socket.
_FULL_WHEN_THE_PEER_GOES = """
import time

import zmq

from hetrl.runtime.transport.sockets import QUEUE_MESSAGES, client_socket, server_socket
from hetrl.runtime.wire.keys import make_run_keys

keys = make_run_keys(["alpha", "beta"])
here, there = zmq.Context(), zmq.Context()
server = server_socket(there, keys["alpha"])
port = server.bind_to_random_port("tcp://127.0.0.1")
client = client_socket(here, keys["beta"], keys["alpha"].public)
client.connect(f"tcp://127.0.0.1:{port}")
client.send(b"hello")
name = server.recv()
assert server.recv() == b"hello"
sent = 0
try:
    while server.poll(500, zmq.POLLOUT):
        server.send_multipart([name, bytes(2**20)], flags=zmq.DONTWAIT)
        sent += 1
except zmq.Again:
    pass
assert sent > QUEUE_MESSAGES
server.close(0)
there.term()
time.sleep(5.0)
read = 0
while client.poll(200):
    client.recv()
    read += 1
assert read >= QUEUE_MESSAGES, read
client.close(0)
here.term()
print("read", read)
"""


def test_a_peer_that_goes_while_its_messages_wait_takes_nobody_with_it() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _FULL_WHEN_THE_PEER_GOES], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("read ")
