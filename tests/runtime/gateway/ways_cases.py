"""What the tests of ways stand between two sites: an HTTP proxy, and a login node's sshd."""

from __future__ import annotations

import asyncio
import base64
import getpass
import socket
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import psutil

from hetrl.errors import SiteUnreachableError
from hetrl.runtime.gateway import tcp
from launch.ports import free_ports

SSHD = "/usr/sbin/sshd"


@asynccontextmanager
async def http_proxy(answer: bytes = b"", password: str | None = None) -> AsyncIterator[tuple[str, list[bytes]]]:
    """Serve as an HTTP proxy: connect as asked and splice, or say `answer`; yields its address and the requests."""
    requests: list[bytes] = []
    listener = tcp.listen("127.0.0.1", 0)

    async def serve_one(client: socket.socket) -> None:
        with client:
            request = await tcp.read_through(client, b"\r\n\r\n", 4096)
            requests.append(request)
            wanted = b"" if password is None else base64.b64encode(password.encode())
            if wanted not in request:
                await tcp.send(client, b"HTTP/1.1 407 Proxy Authentication Required\r\n\r\n")
            elif answer:
                await tcp.send(client, answer)
            else:
                await connect(client, request.split()[1].decode())

    async def connect(client: socket.socket, address: str) -> None:
        try:
            far = await tcp.connect(address)
        except SiteUnreachableError:
            await tcp.send(client, b"HTTP/1.1 502 Bad Gateway\r\n\r\n")
            return
        await tcp.send(client, b"HTTP/1.0 200 Connection established\r\nVia: test\r\n\r\n")
        await tcp.splice(client, far)

    async def serve() -> None:
        async with asyncio.TaskGroup() as connections:
            while True:
                connections.create_task(serve_one(await tcp.accept(listener)))

    serving = asyncio.create_task(serve())
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}", requests
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        listener.close()


class Sshd:
    """A private sshd on loopback that takes one key, with the client's configuration that fits it."""

    def __init__(self, folder: Path) -> None:
        for name in ("host", "user"):
            key = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
            subprocess.run(key, check=True, stdin=subprocess.DEVNULL)
        (self._port,) = free_ports(1)
        self.client, self._server = folder / "ssh_config", folder / "sshd_config"
        (folder / "known").write_text(f"[127.0.0.1]:{self._port} {(folder / 'host.pub').read_text()}")
        self.client.write_text(
            f"Host login\n HostName 127.0.0.1\n Port {self._port}\n User {getpass.getuser()}\n"
            f" IdentityFile {folder}/user\n IdentitiesOnly yes\n UserKnownHostsFile {folder}/known\n"
        )
        self._server.write_text(
            f"ListenAddress 127.0.0.1\nPort {self._port}\nHostKey {folder}/host\nPidFile none\nStrictModes no\n"
            f"AuthorizedKeysFile {folder}/user.pub\nUsePAM no\nPasswordAuthentication no\n"
        )
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        Path("/run/sshd").mkdir(exist_ok=True)  # sshd of Debian wants it where it runs as root
        command = [SSHD, "-D", "-e", "-f", str(self._server)]
        self._process = subprocess.Popen(command, stderr=subprocess.DEVNULL, start_new_session=True)

    def stop(self) -> None:
        """Kill the server and, as the end of a login node would, its sessions."""
        if self._process is not None:
            server = psutil.Process(self._process.pid)
            for one in (*server.children(recursive=True), server):
                one.kill()
            self._process.wait()
            self._process = None

    @contextmanager
    def away(self) -> Iterator[None]:
        self.stop()
        try:
            yield
        finally:
            self.start()
