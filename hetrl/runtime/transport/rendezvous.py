"""How the processes of a site find each other where addresses are known only once Slurm has placed them.

Whoever serves picks an address and a port of its node and writes `tcp://host:port` into a file of the site's directory,
which all nodes share; whoever connects waits for the file:

    gateway.endpoint          the site's gateway
    peers/<site>.endpoint     the gateway of another site, brought by the launcher where the way there is direct
"""

from __future__ import annotations

import socket
import time
from pathlib import Path

import psutil

from hetrl.errors import GangTimeoutError, UsageError
from hetrl.files import replace_text

GATEWAY_ENDPOINT = "gateway.endpoint"
POLL_SECONDS = 0.5
_NOWHERE = ("192.0.2.1", 9)  # TEST-NET-1 (RFC 5737): only its route is looked up, nothing is sent


def peer_endpoint(site: str) -> str:
    """Return the name of the file with another site's gateway."""
    return f"peers/{site}.endpoint"


def node_address(interface: str | None = None) -> str:
    """Return the IPv4 address of this node: of a network interface, else of its name, else of its default route.

    Raises UsageError where the interface has none, or where nothing but loopback is found.
    """
    if interface is not None:
        interfaces = psutil.net_if_addrs()
        for one in interfaces.get(interface, []):
            if one.family == socket.AF_INET:
                return str(one.address)
        names = ", ".join(sorted(interfaces))
        raise UsageError(
            f"{socket.gethostname()}: interface {interface} has no IPv4 address; set `interface` in the site's file "
            f"to one of {names}"
        )
    address = _address_of_name() or _address_of_route()
    if address is None:
        raise UsageError(
            f"{socket.gethostname()}: its name has only a loopback address, and there is no default route; "
            "set `interface` in the site's file"
        )
    return address


def _address_of_name() -> str | None:
    """Return what the node's name resolves to, unless it is loopback, as Debian's /etc/hosts has it."""
    try:
        address = socket.gethostbyname(socket.gethostname())
    except OSError:
        return None
    return None if address.startswith("127.") else address


def _address_of_route() -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(_NOWHERE)
        except OSError:
            return None
        return str(probe.getsockname()[0])


def free_port(host: str) -> int:
    """Return a port of this node's address that nobody listens on."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def publish_endpoint(path: Path, interface: str | None = None, port: int = 0) -> str:
    """Pick an address, and the port unless one is given, and write tcp://host:port to the file; returns it.

    A file that names this address already keeps its port: who serves again is found where it was.
    """
    host = node_address(interface)
    known = read_endpoint(path)
    if known is not None and not port and known.startswith(f"tcp://{host}:"):
        return known
    endpoint = f"tcp://{host}:{port or free_port(host)}"
    replace_text(path, f"{endpoint}\n")
    return endpoint


def read_endpoint(path: Path) -> str | None:
    """Return the endpoint in a file, None where it is not there."""
    try:
        # A directory that is read anew makes NFS forget that the file was not there a moment ago.
        next(path.parent.iterdir(), None)
        return path.read_text().strip() or None
    except FileNotFoundError:
        return None


def wait_for_endpoint(path: Path, timeout_seconds: float, whose: str) -> str:
    """Return the endpoint in a file as soon as it is there; raises GangTimeoutError after `timeout_seconds`."""
    deadline = time.monotonic() + timeout_seconds
    while (endpoint := read_endpoint(path)) is None:
        if time.monotonic() > deadline:
            raise GangTimeoutError(
                f"waited {timeout_seconds:g} s for {path.name}: {whose} did not start; see its log, and `squeue`"
            )
        time.sleep(POLL_SECONDS)
    return endpoint


def meet(
    path: Path, *, serves: bool, timeout_seconds: float, whose: str, interface: str | None = None
) -> tuple[str, int]:
    """Return host and port in a file that whoever `serves` writes and the others wait for."""
    endpoint = publish_endpoint(path, interface) if serves else wait_for_endpoint(path, timeout_seconds, whose)
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    return host, int(port)
