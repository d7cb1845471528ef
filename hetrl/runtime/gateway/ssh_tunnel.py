"""A tunnel to another site's gateway over that site's login node: a child `ssh -N -L`, started again when it ends."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shlex
import shutil
from collections import deque
from collections.abc import AsyncIterator, Callable

from hetrl.errors import UsageError
from hetrl.runtime.gateway.link_report import LinkReport
from hetrl.runtime.parent_death import end_with_parent
from hetrl.runtime.side_by_side import first_to_end

CONNECT_SECONDS = 10
UP_SECONDS = 15.0  # an ssh that outlives its ConnectTimeout has logged in and listens
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 1.0, 30.0
STOP_SECONDS = 3.0
ASK_SECONDS, ASK_PAUSE_SECONDS = 30.0, 5.0  # for the address of a gateway that is not up yet

_NEXT = {
    "Host key verification failed": "log in there once by hand from this site, so that its host key is known",
    "Permission denied": "the key must work without a prompt: name it for that host in ssh_config of the site's file",
    "Could not resolve hostname": "correct `login` in the other site's file",
    "Connection refused": "no sshd is there; correct `login` in the other site's file",
    "timed out": "the firewall may drop ssh: take a relay",
    "administratively prohibited": "that login node forbids tunnels (AllowTcpForwarding): take a relay",
    "cannot listen to port": "another process has the port; it is tried again",
}

_ENDPOINT = "tcp://"
_REFUSED = ": open failed: "  # `channel 2: open failed: connect failed: Connection refused`: ssh goes on
_log = logging.getLogger(__name__)


def ssh_command(login: str, endpoint: str, local_port: int, ssh_config: str | None) -> list[str]:
    """Return the command of a tunnel from a port of this machine to `endpoint` (host:port) as `login` sees it.

    `login` is a destination of OpenSSH (ssh(1)). A connection of the user's own that is shared (ControlMaster) is left
    alone: the forwarding would outlive the run in it.
    """
    options = ["-o", "ExitOnForwardFailure=yes", "-N", "-L", f"127.0.0.1:{local_port}:{endpoint}"]
    return [*_ssh(ssh_config), *options, "--", login]


def ask_command(login: str, file: str, ssh_config: str | None) -> list[str]:
    """Return the command that prints a file of the other site."""
    return [*_ssh(ssh_config), "--", login, shlex.join(["cat", file])]


def _ssh(ssh_config: str | None) -> list[str]:
    options = {
        "BatchMode": "yes",
        "ConnectTimeout": str(CONNECT_SECONDS),
        "ControlMaster": "no",
        "ControlPath": "none",
        # ssh ends, and is started again, where the other end has not answered for 3 x 5 s (ssh_config(5)).
        "ServerAliveInterval": "5",
        "ServerAliveCountMax": "3",
    }
    words = ["ssh", "-T", *(["-F", ssh_config] if ssh_config else [])]
    for name, value in options.items():
        words += ["-o", f"{name}={value}"]
    return words


def require_ssh(site: str, peer: str) -> None:
    """Raise UsageError where this machine has no OpenSSH."""
    if shutil.which("ssh") is None:
        raise UsageError(
            f"{site}: there is no ssh here, and the way to {peer} is ssh; install the OpenSSH client on the nodes, "
            f"or set ways: {{{peer}: relay}} in the file of {site}"
        )


async def keep_tunnel_to(ask: list[str], tunnel: Callable[..., list[str]], report: LinkReport) -> None:
    """Ask, until there is an answer, where the other gateway listens; then keep the tunnel there open until cancelled.

    When nobody takes connections there any more, ask again: its job may have been started anew, on another node.
    `tunnel` takes the `endpoint` (host:port) and returns the command of `keep_tunnel`.
    """
    while True:
        answer, last_line = await _ask(ask)
        if answer:
            refused = asyncio.Event()
            keeping = keep_tunnel(tunnel(endpoint=answer.removeprefix(_ENDPOINT)), report, refused.set)
            await first_to_end(keeping, _moved(ask, answer, refused))
            continue
        report.down(f"the other gateway is not up yet: {last_line or 'ssh ended without a word'}")
        await asyncio.sleep(ASK_PAUSE_SECONDS)


async def _moved(ask: list[str], before: str, refused: asyncio.Event) -> None:
    """Return once connections are refused where the other gateway was, and it listens elsewhere."""
    while True:
        await refused.wait()
        answer, _ = await _ask(ask)
        if answer and answer != before:
            return
        refused.clear()
        await asyncio.sleep(ASK_PAUSE_SECONDS)


async def _ask(command: list[str]) -> tuple[str, str]:
    """Run ssh; return the endpoint that the other site says, and the last line of what ssh itself says.

    Lines in front of it, as a login shell's greeting, are no answer.
    """
    try:
        process = await _start(command, stdout=asyncio.subprocess.PIPE)
    except OSError as error:
        return "", f"cannot start: {error.strerror}"
    try:
        async with asyncio.timeout(ASK_SECONDS):
            answer, said = await process.communicate()
    except TimeoutError:
        return "", f"no answer within {ASK_SECONDS:g} s"
    finally:
        await _end(process)
    lines = said.decode(errors="replace").strip().splitlines()
    told = (line.strip() for line in answer.decode(errors="replace").splitlines())
    endpoint = next((line for line in told if line.startswith(_ENDPOINT)), "")
    return endpoint, lines[-1] if lines else ""


async def keep_tunnel(command: list[str], report: LinkReport, refused: Callable[[], None] = lambda: None) -> None:
    """Keep a tunnel open until cancelled; what ssh says goes to the log, and why it ends to the report.

    `refused` is told each time that a connection through it comes to nothing.
    """
    pause_seconds = FIRST_PAUSE_SECONDS
    said: deque[str] = deque(maxlen=20)
    while True:
        try:
            stood, last_line = await _one_tunnel(command, report, said, refused)
        except OSError as error:  # no memory for a process, or the file system of ssh is away
            stood, last_line = False, f"cannot start: {error.strerror}"
        remedy = next((f"; {todo}" for sign, todo in _NEXT.items() if sign in last_line), "")
        report.down(f"ssh ended: {last_line or 'without a word'}{remedy}")
        pause_seconds = FIRST_PAUSE_SECONDS if stood else min(2 * pause_seconds, LONGEST_PAUSE_SECONDS)
        await asyncio.sleep(pause_seconds)


async def _one_tunnel(
    command: list[str], report: LinkReport, said: deque[str], refused: Callable[[], None]
) -> tuple[bool, str]:
    """Run ssh to its end; return whether the tunnel ever stood, and ssh's last line."""
    process = await _start(command, stdout=asyncio.subprocess.DEVNULL)
    listening = asyncio.create_task(_listen_to(process, report, said, refused))
    stood = False
    try:
        try:
            async with asyncio.timeout(UP_SECONDS):
                await asyncio.shield(listening)
        except TimeoutError:
            stood = True
            report.up()
        return stood, await listening
    finally:
        listening.cancel()
        await _end(process)


async def _start(command: list[str], stdout: int) -> asyncio.subprocess.Process:
    """Start ssh as a child that ends with this process."""
    return await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=stdout,
        stderr=asyncio.subprocess.PIPE,
        preexec_fn=end_with_parent,
    )


async def _listen_to(
    process: asyncio.subprocess.Process, report: LinkReport, said: deque[str], refused: Callable[[], None]
) -> str:
    """Log each line of ssh that it did not say lately; return its last one when it ends."""
    assert process.stderr is not None
    last_line = ""
    async for raw in _lines(process.stderr):
        last_line = raw.decode(errors="replace").strip() or last_line
        if _REFUSED in last_line:
            refused()
        if last_line not in said:
            said.append(last_line)
            _log.info("%s: ssh: %s", report.link, last_line)
    return last_line


async def _lines(stream: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Yield the lines of a stream; one that is longer than its buffer, as a banner may be, in parts."""
    while True:
        try:
            line = await stream.readuntil()
        except asyncio.IncompleteReadError as end:
            if end.partial:
                yield end.partial
            return
        except asyncio.LimitOverrunError as full:
            line = await stream.readexactly(full.consumed)
        yield line


async def _end(process: asyncio.subprocess.Process) -> None:
    """Terminate ssh, kill it where it does not end."""
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    try:
        async with asyncio.timeout(STOP_SECONDS):
            await process.wait()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
