"""The quickstart over the sites of a lab: each site's processes in the network of one of its nodes.

Only the topology files differ from the quickstart's. The run's files are this machine's: what is apart is the network.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from lab import pods
from lab.lab import ROOT, Lab
from lab.shape import JOB_USER, RELAY_PORTS

QUICKSTART = ROOT / "configs/quickstart.yaml"
SITES = ("alpha", "beta", "gamma")
GATEWAY_PORT = 7400  # the filter lets nobody outside the site reach it
SECRET = "relay.secret"


class Relay:
    """`hetrl relay` on the head of a site, as the job user."""

    def __init__(self, lab: Lab, site: str) -> None:
        self.address = f"{lab.address(site)}:{RELAY_PORTS[0]}"
        self.secret = lab.home(site) / SECRET
        self._lab, self._site = lab, site
        self._log = (lab.directory / "log" / f"relay-{site}.log").open("a")

    def start(self) -> None:
        """Start it, and return when it listens."""
        command = [sys.executable, "-m", "launch.cli", "relay", "--listen", self.address, "--secret", SECRET]
        environment = {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
        more = {"stdout": self._log, "stderr": subprocess.PIPE}
        self._process = self._lab.popen(self._site, command, environment=environment, **more)
        assert self._process.stderr
        assert any("listens" in line for line in self._process.stderr), "the relay did not start"

    def kill(self) -> None:
        """End it without a word; a relay that has ended already is none of our making."""
        assert self._process.poll() is None, "the relay ended by itself"
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()


@contextmanager
def relay_at(lab: Lab, site: str) -> Iterator[Relay]:
    """Run a relay on the head of a site."""
    relay = Relay(lab, site)
    relay.start()
    try:
        yield relay
    finally:
        relay.kill()


def over_relay(relay: Relay, work: Path) -> dict[str, dict[str, Any]]:
    """Return what the site files say where all sites meet at one relay."""
    work.mkdir(parents=True, exist_ok=True)
    secret = work / SECRET
    shutil.copy(relay.secret, secret)
    secret.chmod(0o600)
    return {site: {"egress": "relay", "relay": relay.address, "relay_secret": str(secret)} for site in SITES}


def over_ssh(lab: Lab, work: Path) -> dict[str, dict[str, Any]]:
    """Return what the site files say where each site's head lets tunnels in."""
    work.mkdir(parents=True, exist_ok=True)
    known = lab.home("alpha") / ".ssh" / "known_hosts"
    config = work / "ssh_config"
    config.write_text(
        f"Host *\n IdentityFile {lab.directory}/ssh/user\n IdentitiesOnly yes\n UserKnownHostsFile {known}\n"
        " HostKeyAlias alpha\n"  # all heads have one key
    )
    login = {site: f"{JOB_USER}@{lab.address(site)}" for site in SITES}
    return {site: {"ingress": "ssh", "login": login[site], "ssh_config": str(config)} for site in SITES}


def over_lab(lab: Lab, work: Path, ways: Mapping[str, Mapping[str, Any]], **sections: Any) -> Path:
    """Write the quickstart's configuration with the sites and links of a lab; returns its path.

    Every site has a part, as in configs/lab.yaml. One rank trains, so that a run starts fast.
    """
    topology = work / "sites"
    topology.mkdir(parents=True)
    for site in SITES:
        node = f"{site}-1"
        place = {"prefix": pods.in_network(lab.pid(node)), "gateway_port": GATEWAY_PORT}
        place["gateway_host"] = lab.address(node)
        described = yaml.safe_load((ROOT / "topology" / "sites" / f"{site}.yaml").read_text())
        described["nodes"][0]["gpus"] = 1
        (topology / f"{site}.yaml").write_text(yaml.safe_dump({**described, **place, **ways[site]}))
    links = [
        {"between": sorted(pair), "delay_ms": link.delay_ms, "gbps": link.gbps} for pair, link in lab.links.items()
    ]
    (topology / "links.yaml").write_text(yaml.safe_dump({"links": links}))
    files = {"sites": [str(topology / f"{site}.yaml") for site in SITES], "links": str(topology / "links.yaml")}
    return changed(work, topology=files, planner={"solver": "streamrl"}, **sections)


def changed(work: Path, **sections: Any) -> Path:
    """Write the quickstart's configuration with some keys replaced; a section given as a dict is merged."""
    document = yaml.safe_load(QUICKSTART.read_text())
    for key, value in sections.items():
        document[key] = {**document[key], **value} if isinstance(value, dict) and key in document else value
    work.mkdir(parents=True, exist_ok=True)
    path = work / "config.yaml"
    path.write_text(yaml.safe_dump(document))
    return path
