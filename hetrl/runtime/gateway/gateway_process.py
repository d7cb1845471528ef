"""The process of one site's gateway: `python -m hetrl.runtime.gateway.gateway_process --member gateway.json`.

gateway.json     run, site, bind (the gateway's endpoint; none: an address of this node, of `interface` and `port` where
                 they are given, which goes to gateway.endpoint), members (the addresses of the run), hold_seconds,
                 patience_seconds (by peer), orphan_seconds, keys, relay_keys (file names), and the ways to the peers
                 (`hetrl.runtime.gateway.ways.SiteLinks`): links, offers, proxy, ...
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import math
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import msgspec

from hetrl.errors import HetrlError, UsageError
from hetrl.files import read_private
from hetrl.runtime.garbage import collect_rarely
from hetrl.runtime.gateway.gateway import Gateway
from hetrl.runtime.gateway.ways import SiteLinks, Ways, open_ways
from hetrl.runtime.transport.rendezvous import GATEWAY_ENDPOINT, publish_endpoint
from hetrl.runtime.wire.keys import read_keys


@dataclass(frozen=True)
class GatewayFile:
    """What `gateway.json` says beside the ways to the peers."""

    run: str
    site: str
    bind: str | None
    members: frozenset[str]
    hold_seconds: float
    keys: str
    patience_seconds: Mapping[str, float] = field(default_factory=dict)
    relay_keys: str | None = None
    interface: str | None = None
    port: int = 0
    orphan_seconds: float | None = None


def main() -> int:
    """Run the gateway that `--member FILE` describes until SIGTERM or SIGUSR1; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m hetrl.runtime.gateway.gateway_process", description=main.__doc__)
    parser.add_argument("--member", type=Path, required=True, help="gateway.json, as the launcher writes it")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    collect_rarely()
    try:
        asyncio.run(_serve_until_terminated(*read_gateway(parser.parse_args().member)))
    except HetrlError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


def read_gateway(path: Path) -> tuple[Gateway, Ways]:
    """Return the gateway of a member file, and the ways that it takes.

    Raises UsageError for a file that is not one, HetrlError for keys that cannot be read.
    """
    try:
        raw = json.loads(path.read_text())
        described, links = msgspec.convert(raw, GatewayFile), msgspec.convert(raw, SiteLinks)
    except OSError as error:
        raise UsageError(f"{path}: cannot read the gateway's member file ({error.strerror})") from error
    except (ValueError, msgspec.MsgspecError) as error:
        raise UsageError(f"{path}: not a gateway's member file ({error}); submit the run again") from error
    keys = read_keys(described.keys)
    relay_keys = _relay_keys(described.relay_keys) if described.relay_keys else {}
    credentials = read_private(links.proxy_credentials, "password file").strip() if links.proxy_credentials else None
    bind = described.bind or publish_endpoint(path.parent / GATEWAY_ENDPOINT, described.interface, described.port)
    ways = open_ways(described.site, described.run, links, bind, relay_keys, credentials)
    gateway = Gateway(
        described.site,
        described.run,
        bind,
        ways.endpoints,
        keys,
        described.members,
        directory=path.parent,
        hold_seconds=described.hold_seconds,
        patience_seconds=described.patience_seconds,
        streams={peer: way.streams for peer, way in links.links.items()},
        orphan_seconds=math.inf if described.orphan_seconds is None else described.orphan_seconds,
    )
    return gateway, ways


def _relay_keys(path: str) -> dict[str, bytes]:
    """Return the run's key of each relay."""
    try:
        keys = json.loads(read_private(path, "file of relay keys"))
        return {relay: bytes.fromhex(key) for relay, key in keys.items()}
    except (ValueError, TypeError, AttributeError):
        # The cause is cut off: its text may quote the file.
        raise UsageError(f"{path}: not a file of relay keys; submit the run again to write it") from None


async def _serve_until_terminated(gateway: Gateway, ways: Ways) -> None:
    """Serve until a signal; a way that fails by a defect ends the gateway and is raised."""
    async with serving(gateway, ways) as work:
        # srun kills its tasks at SIGTERM, and hands SIGUSR1 on: by that one a job's script says that it is over.
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            stop = partial(gateway.stop, for_good=number == signal.SIGUSR1)
            asyncio.get_running_loop().add_signal_handler(number, stop)
        await asyncio.wait(work, return_when=asyncio.FIRST_COMPLETED)


@asynccontextmanager
async def serving(gateway: Gateway, ways: Ways) -> AsyncIterator[set[asyncio.Task[None]]]:
    """Run a gateway and its ways, whose tasks the body gets; a defect of either is raised at the end."""
    serve, carry = asyncio.create_task(gateway.serve()), asyncio.create_task(ways.carry())
    try:
        yield {serve, carry}
    finally:
        gateway.stop()
        try:
            await serve
        finally:
            carry.cancel()
            (ended,) = await asyncio.gather(carry, return_exceptions=True)
    if isinstance(ended, Exception):
        raise ended


if __name__ == "__main__":
    sys.exit(main())
