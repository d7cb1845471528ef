"""Read what Slurm's commands print: pure functions from text to values.

The text formats `Key=Value` of `scontrol --oneliner` have been the same for the keys read here since Slurm 20.11, while
the JSON changes its shapes with every release. Source: scontrol(1), squeue(1), sbatch(1).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping

from hetrl.describe.inventory import ClusterNode, Inventory, Partition, Reservation, expand_hosts, gigabytes
from hetrl.errors import HetrlError
from launch.remote import parse

_NOTHING = {"", "(null)", "N/A", "None", "NONE", "n/a"}


def of_cluster(cluster: str | None) -> tuple[str, ...]:
    """Return the words that name a cluster to a program of Slurm, none for the login node's own.

    Where clusters share a slurmdbd, `-M` works from any of their login nodes. In a federation it keeps a job where it
    is submitted, and job ids hold the number of their cluster above bit 26 (Slurm's Federated Scheduling Guide).
    """
    return () if cluster is None else ("-M", cluster)


def at_cluster(program: str, cluster: str | None) -> str:
    """Return the command that a person types to ask a program of Slurm about a cluster."""
    return shlex.join((program, *of_cluster(cluster)))


def parse_discovery(text: str, site: str, measured_at: str) -> Inventory:
    """Read what discover.sh printed; raises HetrlError where a part is missing."""
    parts = {name: part.text for name, part in parse(text).items()}
    missing = [name for name in ("version", "config", "partitions", "nodes") if not parts.get(name, "").strip()]
    if missing:
        raise HetrlError(f"{site}: Slurm said nothing about {', '.join(missing)}; try `scontrol show config` there")
    config = parse_config(parts["config"])
    return Inventory(
        site=site,
        cluster=config.get("ClusterName", site),
        slurm_version=parts["version"].split()[-1],
        measured_at=measured_at,
        max_array_size=int(config.get("MaxArraySize", "1001")),
        mpi_default=config.get("MpiDefault", "none"),
        federated=bool(parts.get("federation", "").strip()),
        partitions=tuple(_partition(row) for row in records(parts["partitions"], "PartitionName")),
        nodes=tuple(_node(row) for row in records(parts["nodes"], "NodeName")),
        switches=_leaf_switches(parts.get("topology", "")),
        reservations=tuple(_reservation(row) for row in records(parts.get("reservations", ""), "ReservationName")),
    )


def parse_config(text: str) -> dict[str, str]:
    """Read `scontrol show config`: a line `Key = Value` each."""
    return {
        key.strip(): value.strip() for key, sign, value in (line.partition("=") for line in text.splitlines()) if sign
    }


def records(text: str, first: str) -> list[dict[str, str]]:
    """Read the one-line records that start with the key `first`; values may hold spaces."""
    found = []
    for line in text.splitlines():
        if line.startswith(f"{first}="):
            # Free text comes last in a record, and may look like keys itself.
            head, reason, free = line.partition(" Reason=")
            row = dict(re.findall(r"(\w[\w:/-]*)=(.*?)(?=\s+\w[\w:/-]*=|\s*$)", head))
            found.append({**row, "Reason": free.strip()} if reason else row)
    return found


def parse_seconds(text: str) -> float | None:
    """Read Slurm's `[days-]hours:minutes:seconds`, `minutes:seconds` or minutes; None where nothing limits."""
    if text.upper() in ("UNLIMITED", "INFINITE") or text in _NOTHING:
        return None
    days, dash, rest = text.rpartition("-")
    numbers = [int(number) for number in rest.split(":")]
    if dash:  # days-hours[:minutes[:seconds]]
        hours, minutes, seconds = [*numbers, 0, 0][:3]
    elif len(numbers) == 3:
        hours, minutes, seconds = numbers
    else:  # minutes[:seconds]
        hours, (minutes, seconds) = 0, [*numbers, 0][:2]
    return float(int(days or 0) * 86400 + hours * 3600 + minutes * 60 + seconds)


def parse_gres(text: str) -> dict[str, int]:
    """Read the GPUs of a GRES list by type: `gpu:a100:4(S:0-1),gpu:2,shard:8` is {a100: 4, "": 2}.

    Slurm appends sockets in parentheses, and to what is in use the indices.
    """
    found: dict[str, int] = {}
    for entry in re.sub(r"\([^)]*\)", "", "" if text in _NOTHING else text).split(","):
        name, *rest = entry.strip().split(":")
        if name == "gpu":
            kind, count = (rest[0], rest[1]) if len(rest) > 1 else ("", rest[0] if rest else "1")
            if not count.isdigit():  # gpu:a100 without a number is one
                kind, count = count, "1"
            found[kind] = found.get(kind, 0) + int(count)
    return {kind: count for kind, count in found.items() if count}


def _partition(row: Mapping[str, str]) -> Partition:
    accounts = row.get("AllowAccounts", "ALL")
    return Partition(
        name=row["PartitionName"],
        default=row.get("Default") == "YES",
        up=row.get("State") == "UP",
        max_seconds=parse_seconds(row.get("MaxTime", "UNLIMITED")),
        default_seconds=parse_seconds(row.get("DefaultTime", "NONE")),
        min_nodes=int(row.get("MinNodes", "0")),
        max_nodes=None if row.get("MaxNodes", "UNLIMITED") == "UNLIMITED" else int(row["MaxNodes"]),
        accounts=None if accounts == "ALL" else tuple(accounts.split(",")),
    )


def _node(row: Mapping[str, str]) -> ClusterNode:
    features = row.get("AvailableFeatures", "")
    return ClusterNode(
        name=row["NodeName"],
        gpus=parse_gres(row.get("Gres", "")),
        gpus_used=parse_gres(row.get("GresUsed", "")),
        cpus=int(row.get("CPUTot", "0")),
        memory_gb=gigabytes(_number(row, "RealMemory") - _number(row, "MemSpecLimit")),
        features=() if features in _NOTHING else tuple(features.split(",")),
        partitions=tuple(name for name in row.get("Partitions", "").split(",") if name),
        states=tuple(_states(row.get("State", "UNKNOWN"))),
        reason=row.get("Reason", ""),
    )


def _states(text: str) -> Iterator[str]:
    """Yield a node's states; signs behind one say more: it does not answer, is in maintenance, is powered up, ...

    Source: sinfo(1), NODE STATE CODES.
    """
    for state in text.split("+"):
        name = state.rstrip("*~#!%$@^-")
        signs = state[len(name) :]
        yield name
        yield from (meant for sign, meant in (("*", "NOT_RESPONDING"), ("$", "MAINTENANCE")) if sign in signs)


def _number(row: Mapping[str, str], key: str) -> float:
    value = row.get(key, "")
    return float(value) if value.isdigit() else 0.0


def _leaf_switches(text: str) -> dict[str, tuple[str, ...]]:
    rows = records(text, "SwitchName")
    return {row["SwitchName"]: expand_hosts(row.get("Nodes", "")) for row in rows if row.get("Level") == "0"}


def _reservation(row: Mapping[str, str]) -> Reservation:
    keys = ("ReservationName", "Nodes", "StartTime", "EndTime", "Users")
    return Reservation(*("" if row.get(key, "") in _NOTHING else row[key] for key in keys))
