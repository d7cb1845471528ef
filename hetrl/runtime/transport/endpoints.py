"""The two doors of a gateway: TCP with CURVE for everybody, a unix socket without it for the members of its own node.

The unix socket lies in the site's directory, whose mode 0700 keeps others out, and the kernel tells whose the process
at the other end is (`gateway.zap`): encryption would add nothing but two passes over every byte. Its name
comes from the TCP endpoint, and a member uses it only where that endpoint is an address of its own node: nodes may
share a directory, but not a socket.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import socket as sockets
import stat
from pathlib import Path
from typing import Any

import zmq

from hetrl.errors import HetrlError

UNIX_DOMAIN = "unix"  # the ZAP domain of the unix socket
_PATH_BYTES = 107  # sun_path without its final zero, unix(7)

_log = logging.getLogger(__name__)


def unix_path(directory: Path, endpoint: str) -> Path:
    """Return where the gateway of TCP `endpoint` has its unix socket."""
    digest = hashlib.blake2b(endpoint.encode(), digest_size=4).hexdigest()
    return directory.absolute() / f"gateway-{digest}.sock"


def why_not_unix(path: Path) -> str | None:
    """Return what is wrong with the place of a unix socket; None where it is this user's alone."""
    if (length := len(os.fsencode(path))) > _PATH_BYTES:
        return f"its path has {length} bytes, at most {_PATH_BYTES} are possible"
    try:
        status = path.parent.stat()
    except OSError as error:
        return str(error)
    if status.st_uid != os.geteuid() or status.st_mode & 0o077:
        return f"{path.parent} is not this user's alone (mode {stat.S_IMODE(status.st_mode):03o}); chmod 700 it"
    return None


def unix_socket_of(directory: Path, endpoint: str) -> Path | None:
    """Return the unix socket of the gateway of TCP `endpoint`, if it is on this node and there."""
    path = unix_path(directory, endpoint)
    if why_not_unix(path) is not None or not is_here(endpoint):
        return None
    try:
        status = path.lstat()
    except OSError:
        return None
    return path if stat.S_ISSOCK(status.st_mode) and status.st_uid == os.geteuid() else None


def is_here(endpoint: str) -> bool:
    """Whether `tcp://host:port` is an address of this node."""
    host, _ = _host_and_port(endpoint)
    try:
        family, *_, address = sockets.getaddrinfo(host, 0, type=sockets.SOCK_STREAM)[0]
        with sockets.socket(family, sockets.SOCK_STREAM) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True


def listen(socket: zmq.Socket[bytes], site: str, endpoint: str, directory: Path | None) -> Path | None:
    """Open both doors of a ROUTER with CURVE; without a directory of its own, or where it cannot, TCP alone.

    Returns the unix socket, which is to be removed before the ROUTER closes: ZeroMQ leaves it there.
    Raises HetrlError when the TCP endpoint is taken or not of this node.
    """
    # TCP first: whoever has the port owns the unix socket, too, which a bind takes from whoever had it.
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        host, port = _host_and_port(endpoint)
        if error.errno == errno.EADDRINUSE:
            raise HetrlError(
                f"{site}: port {port} for the gateway is taken on {host}; "
                "stop what uses it or set gateway_port in the site's file"
            ) from error
        raise HetrlError(
            f"{site}: the gateway cannot listen on {endpoint} ({error}); "
            "set interface and gateway_port in the site's file"
        ) from error
    if directory is None:
        return None
    path = unix_path(directory, endpoint)
    if (trouble := why_not_unix(path) or _listen_unix(socket, path)) is None:
        return path
    _log.warning("%s: no unix socket for members of this node, they use TCP: %s", site, trouble)
    return None


def _listen_unix(socket: zmq.Socket[bytes], path: Path) -> str | None:
    """Bind without CURVE, asking who is there; returns why it failed."""
    # Options hold for the binds that follow them (http://api.zeromq.org/4-3:zmq-setsockopt).
    socket.curve_server = False
    socket.zap_domain = UNIX_DOMAIN.encode()
    try:
        socket.bind(f"ipc://{path}")
    except zmq.ZMQError as error:
        return str(error)
    finally:
        socket.curve_server = True
    return None


def connect_unix(socket: zmq.Socket[Any], path: Path) -> None:
    """Connect without CURVE; whatever the socket connects to later goes without it, too."""
    socket.curve_server = False  # resets the mechanism, also that of a client
    socket.connect(f"ipc://{path}")


def _host_and_port(endpoint: str) -> tuple[str, str]:
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    return host.strip("[]"), port
