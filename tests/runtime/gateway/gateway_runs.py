"""Two gateway processes and their members, for the tests of the ways between them."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager, contextmanager
from pathlib import Path

from hetrl.describe.sites import SiteFile
from hetrl.files import write_private
from hetrl.runtime import wire
from hetrl.runtime.gateway.relay_protocol import key_of_run
from hetrl.runtime.transport.member import Member
from hetrl.runtime.wire.keys import SiteKeys, make_run_keys, write_keys
from launch.ports import gateway_endpoints
from launch.site_ways import links_of

ROOT = Path(__file__).parents[3]
ALPHA, BETA = "alpha/controller/0", "beta/actor_generation/0"
PIECE_BYTES, PIECES = 2**20, 60
GATEWAY = [sys.executable, "-m", "hetrl.runtime.gateway.gateway_process", "--member", "gateway.json"]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}


class Run:
    """The files and gateway processes of two sites; `keys` are what their site files say."""

    def __init__(self, folder: Path, secret: str, **sites: dict[str, object]) -> None:
        files = [SiteFile.model_validate({"name": site, **keys}) for site, keys in sites.items()]
        self.endpoints = gateway_endpoints(files)
        self.keys: dict[str, SiteKeys] = make_run_keys(list(sites))
        self._folders = {site: folder / site for site in sites}
        for site, links in links_of(files, self.endpoints).items():
            self._folders[site].mkdir()
            relays = {relay: key_of_run(secret, "run").hex() for relay in links.relays}
            write_private(self._folders[site] / "relay_keys.json", json.dumps(relays), "file of relay keys")
            write_keys(self._folders[site] / "keys.json", self.keys[site])
            names = {"run": "run", "site": site, "bind": self.endpoints[site], "hold_seconds": 120}
            names |= {"members": [ALPHA, BETA]}
            names |= {"keys": "keys.json", "relay_keys": "relay_keys.json"}
            (self._folders[site] / "gateway.json").write_text(json.dumps({**names, **links.to_json()}))

    @contextmanager
    def gateways(self) -> Iterator[list[subprocess.Popen[bytes]]]:
        processes = []
        with ExitStack() as stack:
            for folder in self._folders.values():
                log = stack.enter_context((folder / "log").open("w"))
                process = subprocess.Popen(GATEWAY, cwd=folder, env=ENVIRONMENT, stderr=log)
                stack.callback(process.wait)
                stack.callback(process.terminate)
                processes.append(process)
            yield processes

    def log(self, site: str) -> str:
        return (self._folders[site] / "log").read_text()

    @asynccontextmanager
    async def members(self) -> AsyncIterator[tuple[Member, Member]]:
        alpha = Member(ALPHA, "run", self.endpoints["alpha"], self.keys["alpha"])
        beta = Member(BETA, "run", self.endpoints["beta"], self.keys["beta"])
        async with alpha, beta:
            yield alpha, beta


async def exchanged(run: Run, pieces: int = 8, after_some: AbstractContextManager[None] | None = None) -> None:
    """Send pieces both ways at once and compare; `after_some` is entered and left when a quarter has arrived."""
    async with run.members() as (alpha, beta):
        bodies = [os.urandom(PIECE_BYTES) for _ in range(pieces)]
        some = asyncio.Event()

        async def send(source: Member, to: str) -> None:
            for number, body in enumerate(bodies):
                await source.send(to, wire.Failed(cause=f"{number}"), [body])

        async def take(member: Member) -> list[bytes]:
            taken = []
            while len(taken) < pieces:
                envelope = await member.receive(90)
                assert envelope.message == wire.Failed(cause=f"{len(taken)}")
                taken.append(bytes(envelope.buffers[0]))
                if len(taken) == pieces // 4:
                    some.set()
            return taken

        taking = [asyncio.create_task(take(member)) for member in (alpha, beta)]
        sending = [asyncio.create_task(send(alpha, BETA)), asyncio.create_task(send(beta, ALPHA))]
        if after_some is not None:
            async with asyncio.timeout(90):
                await some.wait()
            with after_some:
                await asyncio.sleep(1.0)
        assert await asyncio.gather(*taking) == [bodies, bodies]
        await asyncio.gather(*sending)
