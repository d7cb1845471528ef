"""`hetrl discover`: what each cluster has, by one command on its login node, into `topology/measured/SITE.json`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Protocol, TypeVar

from rich.console import Console
from rich.table import Table

from hetrl.describe.inventory import ClusterNode, Inventory, node_groups, unmapped_gpus, write_inventory
from hetrl.describe.sites import SiteFile
from hetrl.describe.yaml_file import read_yaml
from hetrl.errors import HetrlError, PartialError, SiteUnreachableError
from hetrl.report.tables import add_row
from launch.remote import script
from launch.shell import LOGIN_BASH, Shell
from launch.slurm.text import of_cluster, parse_discovery

DISCOVER_SECONDS = 60.0
_Answer = TypeVar("_Answer")


class _Named(Protocol):
    @property
    def name(self) -> str: ...


_Site = TypeVar("_Site", bound=_Named)


def discover_command(arguments: argparse.Namespace) -> int:
    """Measure the sites of these files, write a measured file for each, and print what was found."""
    sites = [read_yaml(path, SiteFile) for path in arguments.sites]
    found, errors = at_every_site(sites, discover)
    written = {}
    for name, inventory in found.items():
        written[name] = arguments.output / f"{name}.json"
        write_inventory(written[name], inventory)
        print(f"{name}: measured into {written[name]}", file=sys.stderr)
    if arguments.json:
        print(json.dumps({name: inventory.to_json() for name, inventory in found.items()}, indent=2))
    elif found:
        Console().print(inventory_table(list(found.values())))
    unknown = [complaint for site in sites if site.name in found for complaint in _unmapped(site, found[site.name])]
    for complaint in unknown:
        print(f"note: {complaint}", file=sys.stderr)
    raise_for(errors.values(), reached=len(found))
    return 0


def discover(site: SiteFile) -> Inventory:
    """Return what a site has now; raises HetrlError where it cannot be reached or has no Slurm."""
    text = Shell(site.name, site.ssh).check(
        LOGIN_BASH,
        stdin=script("discover", at=of_cluster(site.cluster)),
        timeout_seconds=DISCOVER_SECONDS,
        doing="read what the cluster has",
    )
    return parse_discovery(text, site.name, datetime.now(UTC).isoformat(timespec="seconds"))


def at_every_site(
    sites: Sequence[_Site], ask: Callable[[_Site], _Answer]
) -> tuple[dict[str, _Answer], dict[str, HetrlError]]:
    """Ask all sites at the same time; return the answers by site, and the errors of the others."""
    answers: dict[str, _Answer] = {}
    errors: dict[str, HetrlError] = {}
    with ThreadPoolExecutor(max(len(sites), 1)) as pool:
        for site, asked in [(site, pool.submit(ask, site)) for site in sites]:
            try:
                answers[site.name] = asked.result()
            except HetrlError as error:
                errors[site.name] = error
    return answers, errors


def raise_for(errors: Collection[HetrlError], reached: int) -> None:
    """Raise what the errors of some sites amount to: a site's own, several, or a part of the sites."""
    if not errors:
        return
    text = "\n".join(str(error) for error in errors)
    if reached:
        raise PartialError(text)
    raise SiteUnreachableError(text) if len(errors) > 1 else next(iter(errors))


def inventory_table(inventories: Sequence[Inventory]) -> Table:
    """Return the GPUs of each site by type: nodes, GPUs in all, in use, and on nodes that are out of service."""
    table = Table(title="GPUs that Slurm knows", title_justify="left")
    for column in ("site", "GRES", "partitions"):
        table.add_column(column)
    for column in ("nodes", "GPUs", "in use", "out of service"):
        table.add_column(column, justify="right")
    for inventory in inventories:
        kinds: dict[str, list[ClusterNode]] = {}
        for node in inventory.nodes:
            for gres in node.gpus:
                kinds.setdefault(gres, []).append(node)
        for gres, nodes in kinds.items():
            partitions = dict.fromkeys(name for node in nodes for name in node.partitions)
            add_row(table, inventory.site, gres or "(no type)", ", ".join(partitions), *_counts(gres, nodes))
        if not kinds:
            add_row(table, inventory.site, "none", "", "0", "0", "0", "0")
    return table


def _counts(gres: str, nodes: Sequence[ClusterNode]) -> tuple[str, str, str, str]:
    total = sum(node.gpus[gres] for node in nodes)
    used = sum(node.gpus_used.get(gres, 0) for node in nodes)
    out = sum(node.gpus[gres] for node in nodes if not node.in_service)
    return str(len(nodes)), str(total), str(used), str(out)


def _unmapped(site: SiteFile, inventory: Inventory) -> list[str]:
    """Return what a person must still say about the site: GPU names that the catalogue cannot know."""
    try:
        node_groups(inventory, site.gres, site.partitions)
    except HetrlError as error:
        return [str(error)]
    left_out = unmapped_gpus(inventory, site.gres, site.partitions)
    return [f"{complaint}, else they are left out" for complaint in left_out]
