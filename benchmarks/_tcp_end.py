"""One end of the benchmark `tcp`: plain TCP streams to or from the other end, timed for each line of JSON on stdin.

argv: listen or connect, the listener's host, port, streams per direction, paced or plain. A line: [bytes, both
directions?]; else only the connecting end sends.
"""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence

from hetrl.runtime.transport.pacing import pace

CHUNK_BYTES = 2**18
_RETRY_SECONDS = 0.1


def connections(role: str, host: str, port: int, count: int) -> list[socket.socket]:
    """Return so many connections between the two ends, in the same order at both."""
    if role == "listen":
        with socket.create_server((host, port)) as listener:
            return [listener.accept()[0] for _ in range(count)]
    found: list[socket.socket] = []
    while len(found) < count:
        try:
            found.append(socket.create_connection((host, port)))
        except ConnectionRefusedError:  # the other end is not up yet
            time.sleep(_RETRY_SECONDS)
    return found


def send_all(streams: Sequence[socket.socket], size_bytes: int) -> list[threading.Thread]:
    """Send bytes, a chunk at a time over whichever stream has room."""
    turns = iter(range(-(-size_bytes // CHUNK_BYTES)))
    lock, chunk = threading.Lock(), bytes(CHUNK_BYTES)

    def work(stream: socket.socket) -> None:
        while True:
            with lock:
                turn = next(turns, None)
            if turn is None:
                return
            stream.sendall(chunk[: size_bytes - turn * CHUNK_BYTES])

    return _started(work, streams)


def receive_all(streams: Sequence[socket.socket], size_bytes: int) -> list[threading.Thread]:
    """Take bytes out of the streams until all of them have arrived."""
    lock, missing_bytes = threading.Lock(), size_bytes

    def work(stream: socket.socket) -> None:
        nonlocal missing_bytes
        buffer = bytearray(2**20)
        stream.settimeout(0.02)  # somebody else may have taken the last byte
        while missing_bytes:
            try:
                count = stream.recv_into(buffer)
            except TimeoutError:
                continue
            with lock:
                missing_bytes -= count

    return _started(work, streams)


def _started(work: Callable[[socket.socket], None], streams: Sequence[socket.socket]) -> list[threading.Thread]:
    threads = [threading.Thread(target=work, args=(stream,)) for stream in streams]
    for thread in threads:
        thread.start()
    return threads


def main() -> None:
    """Serve until stdin ends."""
    role, host, port, count = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    found = connections(role, host, port, 2 * count)
    for stream in found if sys.argv[5] == "paced" else ():
        pace(stream)
    out, back = (found[:count], found[count:]) if role == "connect" else (found[count:], found[:count])
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        size_bytes, both = json.loads(line)
        start = time.monotonic()
        sending = send_all(out, size_bytes) if both or role == "connect" else []
        receiving = receive_all(back, size_bytes) if both or role == "listen" else []
        for thread in receiving:
            thread.join()
        seconds = time.monotonic() - start
        for thread in sending:
            thread.join()
        print(json.dumps(seconds if receiving else 0.0), flush=True)


if __name__ == "__main__":
    main()
