"""Three sites on one machine: pods in namespaces, shaped links, a packet filter, and Slurm where asked for.

    with Lab(links={("alpha", "beta"): Link(gbps=0.1, delay_ms=20)}, slurm=True) as lab:
        lab.run("alpha", ["sbatch", "--wait", "--gres=gpu:a100:2", "--wrap", "hostname"])

Needs root. docs/lab.md tells what the lab is like from inside.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from itertools import combinations
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from lab import pods, slurm, ssh, state, wan
from lab.processes import LabError, call, enter, environment_of, wait_until
from lab.shape import DEFAULT_LINK, JOB_USER, LINKS, SITES, Link, Pod, Site, all_pods, filter_rules

ROOT = Path(__file__).resolve().parents[1]

Accounting = Literal["none", "slurmdbd", "federation"]


class Lab:
    """Sites that are there inside the `with` block; nothing of them is left behind, however the block or process ends.

    `links` replaces single links of LINKS; a pair of sites that has none gets 1 Gb/s and 5 ms. `open` lifts the
    packet filter. `slurm` starts one cluster per site, as strangers; `accounting` joins them by one slurmdbd, or to a
    federation. Raises LabError where something does not start.
    """

    def __init__(
        self,
        sites: Mapping[str, Site] = SITES,
        links: Mapping[tuple[str, str], Link] = {},
        *,
        slurm: bool = False,
        accounting: Accounting = "none",
        open: bool = False,
        name: str | None = None,
    ) -> None:
        self.sites = dict(sites)
        self.pods = all_pods(sites)
        self.slurm = slurm or accounting != "none"
        self.accounting = accounting
        self.directory = state.LABS / name if name else state.LABS
        self.links = {frozenset(pair): link for pair, link in (*LINKS.items(), *links.items())}
        self._open = open
        self._stack = ExitStack()
        self._processes: list[subprocess.Popen[str]] = []

    @classmethod
    def attach(cls, directory: Path) -> Lab:
        """Return a lab that another process keeps up; do not use it in a `with` statement."""
        known = state.read(directory)
        sites = {name: Site(**site) for name, site in known["sites"].items()}
        links = {(a, b): Link(**link) for a, b, link in known["links"]}
        lab = cls(sites, links, slurm=known["slurm"], accounting=known["accounting"])
        lab.directory = directory
        return lab

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._start(stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    # --- use ----------------------------------------------------------------------------------------------------------

    def run(
        self,
        node: str,
        argv: Sequence[str],
        *,
        user: str = JOB_USER,
        timeout_seconds: float = 60,
        check: bool = True,
        input: str | None = None,
        environment: Mapping[str, str] = {},
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in a pod, in the user's home, and return its output as text.

        At the deadline the command is killed. Raises LabError then, and on a return code other than 0 where `check`.
        """
        command = [*enter(self.pid(node), user), *argv]
        shown = f"{node}: {shlex.join(argv)}"
        return call(command, timeout_seconds, check, shown, input=input, env=environment_of(user, environment))

    def popen(
        self,
        node: str,
        argv: Sequence[str],
        *,
        user: str = JOB_USER,
        environment: Mapping[str, str] = {},
        **more: Any,
    ) -> subprocess.Popen[str]:
        """Start a command in a pod, in a session of its own; `more` is for subprocess.Popen.

        `os.killpg(process.pid, ...)` reaches it with its children; `process.kill()` kills it alone.
        """
        command = [*enter(self.pid(node), user), *argv]
        more = {"stdin": subprocess.DEVNULL, "text": True, **more}
        return subprocess.Popen(command, env=environment_of(user, environment), start_new_session=True, **more)

    def address(self, node: str) -> str:
        """Return the IPv4 address of a head or node."""
        return self._pod(node).address

    def home(self, site: str) -> Path:
        """Return the job user's home of a site as this process sees it; in the site's pods it is /home/labuser."""
        return self.directory / "home" / site / JOB_USER

    def log(self, daemon: str) -> str:
        """Return the log of slurmctld-SITE, slurmd-NODE, sshd, slurmdbd, ..."""
        return (self.directory / "log" / f"{daemon}.log").read_text(errors="replace")

    def pid(self, node: str) -> int:
        """Return the first process of a pod, as this process sees it."""
        name = self._pod(node).name
        try:
            return int((self.directory / "pods" / name).read_text())
        except FileNotFoundError:
            raise LabError(f"{name} is not up; start it with start_node") from None

    # --- change -------------------------------------------------------------------------------------------------------

    def link(
        self, a: str, b: str, gbps: float, delay_ms: float, loss: float = 0.0, jitter_ms: float = 0.0, **more: Any
    ) -> None:
        """Shape the link between two sites, in both directions, from the next packet on."""
        link = Link(gbps, delay_ms, loss, jitter_ms, **more)
        wan.order(self.directory, link.request(a, b), link.request(b, a))

    def cut(self, a: str, b: str) -> None:
        """Let nothing pass between two sites, in silence, until `heal`."""
        wan.order(self.directory, f"cut {a} {b}", f"cut {b} {a}")

    def heal(self, a: str, b: str) -> None:
        """Undo `cut`; the link has the shape it had."""
        wan.order(self.directory, f"heal {a} {b}", f"heal {b} {a}")

    def stats(self) -> dict[tuple[str, str], wan.Traffic]:
        """Return the traffic of every directed link, by sender and receiver."""
        return wan.stats(self.directory)

    def bytes_between(self, a: str, b: str) -> int:
        """Return the bytes that crossed the link of two sites, both directions together."""
        stats = self.stats()
        return stats[a, b].bytes + stats[b, a].bytes

    def kill_node(self, node: str) -> None:
        """Cut a node's power: its processes end, and its peers hear nothing of it, not even a reset."""
        pod = self._compute_node(node)
        call(pods.in_network(self.pid(pod.site), "ip", "link", "delete", pods.cable(pod)), 10)
        pods.kill(self.directory, pod)

    def start_node(self, node: str) -> None:
        """Switch a node on again that was killed; with Slurm, return when the controller may use it."""
        pod = self._compute_node(node)
        warden, _ = state.read(self.directory)["warden"]
        self._processes += pods.start(self.directory, warden, [pod], self._visible())
        self._connect(pod)
        if self.slurm:
            slurm.start_node(self, pod)

    def restore(self) -> None:
        """Give the lab the links and nodes again that it began with."""
        for a, b in combinations(self.sites, 2):
            link = self.links.get(frozenset((a, b)), DEFAULT_LINK)
            wan.order(self.directory, link.request(a, b), link.request(b, a))
            self.heal(a, b)
        for name in self.pods:
            if not (self.directory / "pods" / name).exists():
                self.start_node(name)

    # --- start --------------------------------------------------------------------------------------------------------

    def _start(self, stack: ExitStack) -> None:
        state.remove_stale()
        self.directory = state.make_directory(self.directory)
        stack.callback(self._reap)
        warden = stack.enter_context(pods.warden(self.directory))
        self._write_state(warden)
        pods.write_files(self.directory, self.sites)
        ssh.configure(self.directory, self.sites)
        for site in self.sites:
            (self.home(site) / "checkout").symlink_to(ROOT)
            (self.home(site) / "venv").symlink_to(sys.prefix)
        if self.slurm:
            slurm.configure(self.directory, self.sites, self.accounting)
        self._processes += pods.start(self.directory, warden, list(self.pods.values()), self._visible())
        for pod in self.pods.values():
            self._connect(pod)
        self._start_links(warden)
        for site in self.sites:
            self.run(site, ssh.server(self.directory, site), user="root")
        if self.slurm:
            slurm.start(self)

    def _write_state(self, warden: int) -> None:
        sites = {name: asdict(site) for name, site in self.sites.items()}
        links = [[*pair, asdict(link)] for pair, link in self.links.items()]
        mode = {"slurm": self.slurm, "accounting": self.accounting}
        state.write(self.directory, warden, {"sites": sites, "links": links, **mode})

    def _connect(self, pod: Pod) -> None:
        head = self.pid(pod.site)
        if pod.is_head:
            call(pods.in_network(head, "ip", "-batch", "-"), 10, input=pods.head_network(pod))
            return
        pid = self.pid(pod.name)
        call(pods.in_network(head, "ip", "-batch", "-"), 10, input=pods.cable_network(pod, pid))
        gateway = self.address(pod.site)
        call(pods.in_network(pid, "ip", "-batch", "-"), 10, input=pods.node_network(pod, gateway))

    def _start_links(self, warden: int) -> None:
        arguments = [wan.site_argument(self.sites, site, self.pid(site)) for site in self.sites]
        program = str(wan.build(state.BUILD))
        log = self.directory / "log" / "wanem.log"
        command = [program, str(self.directory / wan.SOCKET), *arguments]
        self._processes.append(pods.start_inside(warden, command, log))
        wait_until((self.directory / wan.SOCKET).is_socket, 10, lambda: f"wanem did not start: {log.read_text()}")
        for site in self.sites:
            call(pods.in_network(self.pid(site), "ip", "-batch", "-"), 10, input=pods.wan_network(self.pods[site]))
            if not self._open:
                rules = filter_rules(slurm.SHARED_PORTS if self.accounting != "none" else ())
                call(pods.in_network(self.pid(site), "nft", "-f", "-"), 10, input=rules)
        self.restore()

    def _reap(self) -> None:
        for process in self._processes:
            process.wait(pods.DOWN_SECONDS)

    def _visible(self) -> list[Path]:
        """What jobs need of this machine wherever it lies: the checkout, the virtual environment, its Python."""
        return sorted({ROOT, Path(sys.prefix), Path(sys.base_prefix)})

    def _pod(self, name: str) -> Pod:
        if name not in self.pods:
            raise LabError(f"no pod {name!r} in the lab; there are {', '.join(self.pods)}")
        return self.pods[name]

    def _compute_node(self, name: str) -> Pod:
        if self._pod(name).is_head:
            raise LabError(f"{name} is a head, and the site hangs on it; cut its links instead")
        return self.pods[name]
