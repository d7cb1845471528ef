"""Two gateway processes over tunnels of a real sshd."""

from __future__ import annotations

import asyncio
from pathlib import Path

import psutil
import pytest

from lab.available import skip_unless_available
from launch.local import alive
from tests.launch.launch_cases import until
from tests.runtime.gateway.gateway_runs import PIECES, Run, exchanged
from tests.runtime.gateway.ways_cases import Sshd

pytestmark = pytest.mark.usefixtures("programs")


@pytest.fixture
def programs() -> None:
    skip_unless_available()


def test_through_ssh_tunnels_whose_server_is_killed_and_started_again(tmp_path: Path) -> None:
    sshd = Sshd(tmp_path)
    sshd.start()
    try:
        file = {"egress": "ssh", "login": "login", "ssh_config": str(sshd.client)}
        run = Run(tmp_path, "", alpha=file, beta=file)
        with run.gateways():
            asyncio.run(exchanged(run, PIECES, sshd.away()))
        assert "alpha -> beta by ssh login: ssh ended: " in run.log("alpha")
    finally:
        sshd.stop()


def test_a_gateway_that_is_killed_takes_its_tunnel_with_it(tmp_path: Path) -> None:
    sshd = Sshd(tmp_path)
    sshd.start()
    try:
        run = Run(tmp_path, "", alpha={"egress": "ssh", "ssh_config": str(sshd.client)}, beta={"login": "login"})
        with run.gateways() as (alpha, _):
            until(lambda: psutil.Process(alpha.pid).children(), "alpha starts ssh")
            (tunnel,) = psutil.Process(alpha.pid).children()
            until(lambda: tunnel.name() == "ssh", "the child is ssh")
            alpha.kill()
            until(lambda: not alive(tunnel), "ssh ends")
    finally:
        sshd.stop()
