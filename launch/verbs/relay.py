"""`hetrl relay`: on a host that every site can reach, connects gateways that cannot dial each other."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import signal
import sys
from pathlib import Path

from hetrl.describe.sites import DEFAULT_RELAY_SECRET
from hetrl.errors import HetrlError, UsageError
from hetrl.files import read_private, write_private
from hetrl.runtime.gateway import relay_protocol, tcp
from hetrl.runtime.gateway.relay import Relay, report_status

SECRET = "relay secret"


def relay_command(arguments: argparse.Namespace) -> int:
    """Serve as a relay until SIGTERM or Ctrl-C; a line of JSON on stdout every minute says what passes."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    host, port = tcp.host_and_port(arguments.listen)
    secret = relay_secret((arguments.secret or Path(DEFAULT_RELAY_SECRET)).expanduser())
    listener = tcp.listen(host, port)
    print(f"the relay listens on {host}, port {listener.getsockname()[1]}", file=sys.stderr, flush=True)
    relay = Relay(listener, secret, connections=arguments.connections, per_address=arguments.per_address)
    asyncio.run(_serve_until_terminated(relay))
    return 0


def relay_secret(path: Path) -> str:
    """Return the secret in a file, which is made where there is none.

    Raises HetrlError where others can read the file, or it cannot be written.
    """
    if not path.exists():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise HetrlError(f"{path.parent}: {error.strerror}; name another file with --secret") from None
        write_private(path, relay_protocol.make_secret() + "\n", SECRET)
        print(f"made the secret {path}; whoever submits runs over this relay needs a copy", file=sys.stderr)
    secret = read_private(path, SECRET).strip()
    if len(secret) < relay_protocol.SECRET_LETTERS:
        raise UsageError(f"{path}: too short for a {SECRET}; remove it, and `hetrl relay` makes one")
    return secret


async def _serve_until_terminated(relay: Relay) -> None:
    serving = asyncio.create_task(relay.serve())
    reporting = asyncio.create_task(report_status(relay))
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, serving.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await serving
    reporting.cancel()
