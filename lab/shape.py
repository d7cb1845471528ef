"""What a lab consists of: sites with a head and nodes, their addresses, and the links between sites."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

JOB_USER = "labuser"  # exists in the pods only
JOB_USER_ID = 60606
RELAY_PORTS = range(7000, 7100)  # open at the heads, besides ssh
SSH_PORT = 22
# A link's queue unless told: what its line carries in this time, at least 64 KiB; routers have 10 to 100 ms.
QUEUE_SECONDS = 0.05
QUEUE_FLOOR_BYTES = 65536


@dataclass(frozen=True)
class Site:
    """One cluster: a head (login node, controller) named as the site, and equal nodes `site-1`, `site-2`, ..."""

    nodes: int
    gpu: str = "a100"  # Slurm's GRES type
    gpus_per_node: int = 4
    cpus_per_node: int = 16  # what Slurm believes
    gres: bool = True  # False: Slurm knows of no GPUs there
    second_factor: bool = False  # who logs in from another head shows a second key, which asks for its passphrase


@dataclass(frozen=True)
class Link:
    """The shape of the way between two sites, the same in both directions; `loss` is a fraction of the packets."""

    gbps: float
    delay_ms: float
    loss: float = 0.0
    jitter_ms: float = 0.0
    queue_bytes: int | None = None

    def request(self, sender: str, receiver: str) -> str:
        """Return what asks wanem for one direction of the link."""
        if self.gbps <= 0 or not 0 <= self.loss <= 1 or min(self.delay_ms, self.jitter_ms) < 0:
            raise ValueError(f"link {sender} {receiver}: no such shape: {self}")
        queue_bytes = self.queue_bytes or max(QUEUE_FLOOR_BYTES, self.gbps * 1e9 / 8 * QUEUE_SECONDS)
        numbers = (self.gbps * 1e9, self.delay_ms * 1e6, self.jitter_ms * 1e6, self.loss, queue_bytes)
        return " ".join(["link", sender, receiver, *(f"{number:.9g}" for number in numbers)])


@dataclass(frozen=True)
class Pod:
    """One machine of the lab: namespaces of its own for network, host name, files, processes."""

    name: str
    site: str
    address: str
    gpus: int

    @property
    def is_head(self) -> bool:
        return self.name == self.site


SITES: Mapping[str, Site] = {
    "alpha": Site(nodes=2, gpu="a100"),
    "beta": Site(nodes=2, gpu="l40s"),
    "gamma": Site(nodes=1, gpu="l4"),
}
# Those of configs/lab.yaml: as many GPUs as two cores can bear processes. One is entered over a connection that its
# user has made beforehand, and one's Slurm knows of no GPUs.
RUN_SITES: Mapping[str, Site] = {
    "alpha": Site(1, "a100", 2),
    "beta": Site(1, "l40s", 1, second_factor=True),
    "gamma": Site(1, "l4", 1, gres=False),
}
DEFAULT_LINK = Link(gbps=1.0, delay_ms=5.0)
LINKS: Mapping[tuple[str, str], Link] = {
    ("alpha", "beta"): DEFAULT_LINK,
    ("alpha", "gamma"): Link(gbps=0.5, delay_ms=10.0),
    ("beta", "gamma"): Link(gbps=0.3, delay_ms=20.0),
}


def prefix(sites: Mapping[str, Site], site: str) -> str:
    """Return the first three numbers of a site's network; every site has a /24 of 10.71.0.0/16."""
    return f"10.71.{list(sites).index(site) + 1}"


def all_pods(sites: Mapping[str, Site]) -> dict[str, Pod]:
    """Return all machines by name: heads have the address .1 of their network, nodes .11, .12, ..."""
    found = {}
    for name, site in sites.items():
        network = prefix(sites, name)
        found[name] = Pod(name, name, f"{network}.1", gpus=0)
        for index in range(1, site.nodes + 1):
            node = f"{name}-{index}"
            found[node] = Pod(node, name, f"{network}.{10 + index}", site.gpus_per_node)
    return found


def hosts_file(sites: Mapping[str, Site]) -> str:
    """Return /etc/hosts of every pod. No name is given a loopback address but localhost: gloo would announce it."""
    return "127.0.0.1 localhost\n" + "".join(f"{pod.address} {pod.name}\n" for pod in all_pods(sites).values())


def filter_rules(extra_ports: tuple[int, ...] = ()) -> str:
    """Return the packet filter of a head, for `nft -f -`: what may come in from the other sites.

    To the head: ssh, the relay ports, `extra_ports`, ping. To the nodes: nothing. Answers to what the site itself began
    come in always, and inside a site all is open. Everything else is dropped without an answer, as firewalls do.
    """
    ports = ", ".join(map(str, (SSH_PORT, f"{RELAY_PORTS[0]}-{RELAY_PORTS[-1]}", *extra_ports)))
    return f"""
table inet lab {{
    chain to_head {{
        type filter hook input priority filter; policy accept;
        iifname != "wan0" accept
        ct state established,related accept
        meta l4proto icmp accept
        tcp dport {{ {ports} }} accept
        drop
    }}
    chain to_nodes {{
        type filter hook forward priority filter; policy accept;
        iifname != "wan0" accept
        ct state established,related accept
        drop
    }}
}}
"""
