"""Two gateway processes and their members over each way: what is sent arrives once and in order, cut or not."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hetrl.files import write_private
from hetrl.runtime.gateway.relay_protocol import make_secret
from launch.ports import free_ports
from tests.runtime.gateway.gateway_runs import ENVIRONMENT, GATEWAY, PIECES, ROOT, Run, exchanged
from tests.runtime.gateway.ways_cases import http_proxy


class RelayProcess:
    """`hetrl relay` as a process that can be killed and started again on its port."""

    def __init__(self, folder: Path) -> None:
        self.secret, self.address = make_secret(), f"127.0.0.1:{free_ports(1)[0]}"
        write_private(folder / "relay.secret", self.secret, "relay secret")
        self._command = [sys.executable, "-m", "launch.cli", "relay", "--listen", self.address]
        self._command += ["--secret", str(folder / "relay.secret")]

    def start(self) -> None:
        self._process = subprocess.Popen(self._command, cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL)
        assert self._process.stderr is not None
        assert b"the relay listens on" in self._process.stderr.readline()

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.communicate()

    @contextmanager
    def away(self) -> Iterator[None]:
        self.kill()
        try:
            yield
        finally:
            self.start()


@contextmanager
def relay_process(folder: Path) -> Iterator[RelayProcess]:
    relay = RelayProcess(folder)
    relay.start()
    try:
        yield relay
    finally:
        relay.kill()


def test_over_a_relay(tmp_path: Path) -> None:
    with relay_process(tmp_path) as relay:
        run = Run(tmp_path, relay.secret, alpha={}, beta={"egress": "relay", "relay": relay.address})
        with run.gateways():
            asyncio.run(exchanged(run))
        assert f"alpha -> beta by relay {relay.address}: connected" in run.log("alpha")
        assert f"beta -> alpha by relay {relay.address}: connected" in run.log("beta")


def test_a_relay_that_is_killed_and_started_again_amid_a_transfer_loses_and_doubles_nothing(tmp_path: Path) -> None:
    with relay_process(tmp_path) as relay:
        run = Run(tmp_path, relay.secret, alpha={}, beta={"egress": "relay", "relay": relay.address})
        with run.gateways():
            asyncio.run(exchanged(run, PIECES, relay.away()))
        # At most once for what it dials and once for what it offers.
        assert 1 <= run.log("alpha").count(f"cannot connect to {relay.address} (Connection refused); trying on") <= 2


def test_the_wrong_secret_is_named_in_the_log_and_the_right_one_is_not_shown(tmp_path: Path) -> None:
    async def until_said(run: Run) -> None:
        async with asyncio.timeout(30):
            while "refused: the key is not that of this relay and run" not in run.log("beta"):
                await asyncio.sleep(0.05)

    with relay_process(tmp_path) as relay:
        wrong = make_secret()
        run = Run(tmp_path, wrong, alpha={}, beta={"egress": "relay", "relay": relay.address})
        with run.gateways():
            asyncio.run(until_said(run))
        assert wrong not in run.log("beta")


def test_through_a_proxy(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with http_proxy(password="ada:secret") as (proxy, requests):
            write_private(tmp_path / "password", "ada:secret\n", "password file")
            behind = {"egress": "proxy", "proxy": proxy, "proxy_credentials": str(tmp_path / "password")}
            run = Run(tmp_path, "", alpha={}, beta=behind)
            with run.gateways():
                await exchanged(run)
            assert requests
            assert f"beta -> alpha by proxy {proxy}: connected" in run.log("beta")
            assert "secret" not in run.log("beta")

    asyncio.run(scenario())


def test_a_file_of_relay_keys_that_is_none_is_not_quoted(tmp_path: Path) -> None:
    Run(tmp_path, "", alpha={}, beta={})
    (tmp_path / "alpha" / "relay_keys.json").write_text('{"r:1": "topsecret"}')
    done = subprocess.run(GATEWAY, cwd=tmp_path / "alpha", env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == "relay_keys.json: not a file of relay keys; submit the run again to write it\n"
