"""A tunnel whose ssh ends just as the tunnel is given up: what Slurm's signal to a whole step brings about."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from hetrl.runtime.gateway import ssh_tunnel
from hetrl.runtime.gateway.link_report import LinkReport
from hetrl.runtime.gateway.ssh_tunnel import keep_tunnel, keep_tunnel_to


class Ssh:
    """An ssh that says nothing, and ends when it is told."""

    def __init__(self) -> None:
        self.stderr = asyncio.StreamReader()
        self.stderr.feed_eof()
        self.over = asyncio.get_running_loop().create_future()

    def terminate(self) -> None:
        """Take the signal, and some time."""

    async def wait(self) -> int:
        return await asyncio.shield(self.over)

    async def communicate(self) -> tuple[bytes, bytes]:
        return b"", b"%d" % await self.wait()


@pytest.mark.parametrize("turns", range(6))
@pytest.mark.parametrize(
    "keeping",
    [
        lambda report: keep_tunnel(["ssh"], report),
        lambda report: keep_tunnel_to(["ssh"], lambda endpoint: ["ssh", endpoint], report),
    ],
)
def test_a_tunnel_that_is_given_up_while_its_ssh_ends_is_gone(
    keeping: Callable[[LinkReport], object], turns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The event loop takes some turns from the end of a process to whoever waits for it: cancel in each of them."""

    async def give_up() -> bool:
        ssh = Ssh()

        async def start(command: list[str], stdout: int) -> Ssh:
            return ssh

        monkeypatch.setattr(ssh_tunnel, "_start", start)
        kept = asyncio.ensure_future(keeping(LinkReport("beta -> alpha")))  # type: ignore[arg-type]
        await asyncio.sleep(0.01)
        ssh.over.set_result(0)
        for _ in range(turns):
            await asyncio.sleep(0)
        kept.cancel()
        await asyncio.wait([kept], timeout=0.5)
        return kept.cancelled()

    assert asyncio.run(give_up())


def answers(monkeypatch: pytest.MonkeyPatch, answer: bytes, said: bytes = b"") -> tuple[str, str]:
    """Ask an ssh that prints this."""

    class Answers(Ssh):
        async def communicate(self) -> tuple[bytes, bytes]:
            self.over.set_result(0)
            return answer, said

    async def start(*_: object, **__: object) -> Answers:
        return Answers()

    monkeypatch.setattr(ssh_tunnel, "_start", start)
    return asyncio.run(ssh_tunnel._ask(["ssh"]))


def test_a_login_shell_may_greet_before_it_says_where_the_gateway_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    greeting = b"Loading default modules\n"
    assert answers(monkeypatch, greeting + b"tcp://n1:7001\n") == ("tcp://n1:7001", "")
    assert answers(monkeypatch, greeting, b"cat: no such file\n") == ("", "cat: no such file")


def test_an_ssh_that_cannot_be_started_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def start(*_: object, **__: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(ssh_tunnel, "_start", start)
    assert asyncio.run(ssh_tunnel._ask(["ssh"])) == ("", "cannot start: Resource temporarily unavailable")


def test_a_banner_without_an_end_of_a_line_is_heard_in_parts() -> None:
    async def run() -> list[bytes]:
        stream = asyncio.StreamReader()
        stream.feed_data(b"#" * 200_000 + b"\nrefused\nlast")
        stream.feed_eof()
        return [line async for line in ssh_tunnel._lines(stream)]

    lines = asyncio.run(run())
    assert b"".join(lines) == b"#" * 200_000 + b"\nrefused\nlast"
    assert lines[-2:] == [b"refused\n", b"last"]
