"""Sites of the lab with a gateway each, to try what crosses links: no packet filter, direct ways."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from hetrl.describe.sites import SiteFile
from hetrl.runtime.wire.keys import make_run_keys, write_keys
from hetrl.workload import ACTOR_GENERATION
from lab import pods, wan
from lab.lab import ROOT, Lab
from lab.shape import Site
from launch.site_ways import links_of

SITES = ("alpha", "beta", "gamma")
MEMBERS = [f"{site}/{role}/0" for site in SITES for role in ("actor_training", "actor_training.rank", ACTOR_GENERATION)]
INTERFACE = "eth0"  # of every node
_PORT = 7400
_GATEWAY = (sys.executable, "-m", "hetrl.runtime.gateway.gateway_process", "--member", "gateway.json")


@dataclass(frozen=True)
class Shape:
    """A link: rate of one direction, delay one way, fraction of the packets that are lost."""

    gbps: float
    delay_ms: float
    loss: float

    def __str__(self) -> str:
        lossy = f", {self.loss:.2%} loss" if self.loss else ""
        return f"{self.gbps:g} Gbps, {self.delay_ms:g} ms{lossy}"


class LabSites:
    """The sites while they are up; `folder(site)` has what a member of the site reads.

    Its processes run the package that lies in `code`; gateways listen on `port` and know these `members`. A link may
    be out for `patience_seconds`.
    """

    def __init__(
        self,
        lab: Lab,
        work: Path,
        stack: ExitStack,
        code: Path = ROOT,
        port: int = _PORT,
        *,
        members: Sequence[str] = MEMBERS,
        patience_seconds: float = 600.0,
        gateways: bool = True,
    ) -> None:
        self._lab, self._work, self._stack, self._code = lab, work, stack, code
        self.endpoints = {site: f"tcp://{self.address(site)}:{port}" for site in SITES}
        keys, files = make_run_keys(SITES), [SiteFile(name=site) for site in SITES]
        for site, links in links_of(files, self.endpoints).items():
            self.folder(site).mkdir(mode=0o700, parents=True)  # else the gateway opens no unix socket there
            write_keys(self.folder(site) / "keys.json", keys[site])
            described = {"run": "run", "site": site, "bind": self.endpoints[site], "hold_seconds": 60}
            described |= {"members": [*members], "keys": "keys.json", **links.to_json()}
            described["patience_seconds"] = {peer: patience_seconds for peer in SITES if peer != site}
            (self.folder(site) / "gateway.json").write_text(json.dumps(described))
        self.gateways = [self.start_gateway(site) for site in SITES] if gateways else []

    def folder(self, site: str) -> Path:
        """Return the site's directory."""
        return self._work / site

    def address(self, site: str) -> str:
        """Return the address of the site's node."""
        return self._lab.address(f"{site}-1")

    @property
    def shaper_pid(self) -> int:
        """Return the process that all packets between sites pass."""
        socket = str(self._lab.directory / wan.SOCKET)
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it ended meanwhile
                if (process / "cmdline").read_bytes().split(b"\0")[1:2] == [socket.encode()]:
                    return int(process.name)
        raise RuntimeError("the shaper of the links has ended")

    def shape(self, shape: Shape) -> None:
        """Give all links one shape."""
        for a, b in combinations(SITES, 2):
            self._lab.link(a, b, shape.gbps, shape.delay_ms, shape.loss)

    def cut(self, a: str, b: str) -> None:
        """Let nothing pass between two sites until `heal`."""
        self._lab.cut(a, b)

    def heal(self, a: str, b: str) -> None:
        """Undo `cut`."""
        self._lab.heal(a, b)

    def start_gateway(self, site: str) -> subprocess.Popen[str]:
        """Start the gateway of a site, which has none."""
        return self.start(site, _GATEWAY)

    def start(self, site: str, command: Sequence[str], **environment: str) -> subprocess.Popen[str]:
        """Start a process in the network of a site's node; it ends with the sites. Its stderr goes to a log."""
        log = self._stack.enter_context((self._work / f"{site}.log").open("a"))
        process = subprocess.Popen(
            ["setpriv", "--pdeathsig=KILL", *pods.in_network(self._lab.pid(f"{site}-1"), *command)],
            cwd=self.folder(site),
            env={**os.environ, "PYTHONPATH": str(self._code), "OMP_NUM_THREADS": "1", **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,
        )
        self._stack.callback(_end, process)
        return process


def _end(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


@contextmanager
def open_lab() -> Iterator[tuple[Lab, ExitStack]]:
    """Bring three sites of one node up; what is started on the stack ends before them. Needs root (docs/lab.md)."""
    if os.geteuid() != 0:
        sys.exit("this benchmark runs on the lab of shaped links, which needs root (docs/lab.md)")
    with Lab({site: Site(1) for site in SITES}, open=True) as lab, ExitStack() as stack:
        yield lab, stack


@contextmanager
def lab_sites(work: Path) -> Iterator[LabSites]:
    """Bring three sites up, with their gateways."""
    with open_lab() as (lab, stack):
        yield LabSites(lab, work, stack)


def reply_of(process: subprocess.Popen[str]) -> Any:
    """Return what a process says next, in a line of JSON; raises RuntimeError where it ends instead."""
    assert process.stdout
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"a process ended with {process.wait()}; its log is in the benchmark's directory")
    return json.loads(line)


def order(process: subprocess.Popen[str], what: Any) -> None:
    """Send a process a line of JSON."""
    assert process.stdin
    process.stdin.write(json.dumps(what) + "\n")
    process.stdin.flush()
