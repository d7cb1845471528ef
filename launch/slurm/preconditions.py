"""The preconditions of a run at a site: what to ask its login node, and what the answer means. Pure functions.

One command asks for everything; `judge` turns the answer into findings, each with its remedy.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from hetrl.describe.inventory import Inventory, node_groups, unmapped_gpus
from hetrl.describe.sites import SiteFile
from hetrl.errors import HetrlError
from launch.findings import Finding, Wish, data_found, may_lead, models_found, packages_found, packages_of
from launch.remote import Part, parse, script
from launch.shell import FULL, final_line
from launch.slurm.commands import SBATCH_SECONDS
from launch.slurm.container import login_python_of
from launch.slurm.text import at_cluster, of_cluster, parse_discovery

CLOCK_OFFSET_SECONDS = 30.0
SCRATCH_GB = 50.0
_OF_NODES_ALONE = re.compile(r"Exec format error|cannot execute binary")
FULL_GB = 0.1  # code, plan and logs of a run need about that
SLURMCTLD = "slurmctld"  # what a finding is about where it does not answer
PROGRAMS = ("sbatch", "squeue", "scancel", "srun", "scontrol", "rsync")
# Prints the versions of the packages that it is given, without importing them.
_VERSIONS = """
import json, sys
from importlib import metadata
def version(name):
    try: return metadata.version(name)
    except metadata.PackageNotFoundError: return None
found = {name: version(name) for name in sys.argv[1:]}
print(json.dumps({"python": sys.version.split()[0], **found}))
"""


def questions(site: SiteFile, wish: Wish, jobs: Mapping[str, str] = {}) -> str:
    """Return the script that asks a login node everything, and what sbatch would do with these jobs' scripts."""
    host, _, port = knocked(site).rpartition(":")
    python = login_python_of(site)
    return script(
        *("discover", "doctor"),
        at=of_cluster(site.cluster),
        sbatch_seconds=SBATCH_SECONDS,
        jobs=[word for job in jobs.items() for word in job],
        programs=PROGRAMS,
        setup=site.setup_lines,
        scratch=site.scratch or "",
        models=[site.place(model) for model in wish.models],
        data=site.place(wish.data) if wish.data and may_lead(site) else "",
        versions=[*python, "-c", _VERSIONS, *packages_of(site)] if python else [],
        host=host,
        port=port,
    )


def knocked(site: SiteFile) -> str:
    """Return the host:port that the site's gateway needs to reach on its way out, nothing where there is none."""
    return (getattr(site, site.egress) if site.egress in ("relay", "proxy") else None) or ""


def judge(site: SiteFile, answer: str, wish: Wish, asked_at: float, answered_at: float) -> list[Finding]:
    """Return the findings of a site; the times are those of this machine's clock around the question."""
    parts = parse(answer)
    said = {name: part.text for name, part in parts.items()}
    findings = [
        _clock(site, said.get("clock", ""), asked_at, answered_at),
        _programs(site, said.get("programs", "")),
        _controller(site, said.get("controller", "")),
        _scratch(site, said.get("scratch", "")),
        *_setup(site, said.get("setup", "")),
        *_environment(site, said.get("environment", ""), wish),
        *models_found(site.name, wish, said.get("models", "").splitlines(), site.place),
    ]
    if "data" in parts:
        findings.append(data_found(site, wish, parts["data"].code == 0))
    try:
        inventory = parse_discovery(answer, site.name, "")
    except HetrlError as error:
        # A controller that was away for one question is asked again, as one that is away for all of them.
        what = "inventory" if said.get("programs", "").strip() else SLURMCTLD
        findings.append(Finding(site.name, what, "failed", str(error), "ask the site why scontrol is silent"))
    else:
        findings += [*_federation(site, inventory), *_partitions(site, inventory, wish), *_gpus(site, inventory)]
        findings.append(_queue(site, inventory, parts.get("queue", Part())))
    if "egress" in parts:
        findings.append(_egress(site, parts["egress"]))
    return findings


def _clock(site: SiteFile, text: str, asked_at: float, answered_at: float) -> Finding:
    try:
        there = float(text.strip())
    except ValueError:
        return Finding(site.name, "clock", "warning", "no answer", "run `date` there")
    # The clock was read at some moment between question and answer: only what lies outside is an offset.
    offset = max(there - answered_at, asked_at - there, 0.0)
    if offset > CLOCK_OFFSET_SECONDS:
        return Finding(
            site.name, "clock", "failed", f"{offset:.0f} s off", "have its clock set (NTP); logs would lie about order"
        )
    return Finding(site.name, "clock", "ok", f"within {max(offset, 1.0):.0f} s")


def _programs(site: SiteFile, text: str) -> Finding:
    missing = text.split()
    if missing:
        remedy = "load Slurm's module in your shell start-up there, or install them"
        return Finding(site.name, "programs", "failed", f"not found: {', '.join(missing)}", remedy)
    return Finding(site.name, "programs", "ok", ", ".join(PROGRAMS))


def _controller(site: SiteFile, text: str) -> Finding:
    said = final_line(text) or "no answer"
    if re.search(r"\bUP\b", text):
        return Finding(site.name, SLURMCTLD, "ok", said)
    remedy = f"wait until `{at_cluster('sinfo', site.cluster)}` answers there"
    return Finding(site.name, SLURMCTLD, "failed", said, remedy)


def _federation(site: SiteFile, inventory: Inventory) -> Iterator[Finding]:
    if site.cluster is not None:
        yield Finding(site.name, "cluster", "ok", f"{site.cluster}{', in a federation' * inventory.federated}")
    elif inventory.federated:
        found = "is a member of a federation, which may start a job at another member"
        yield Finding(site.name, "cluster", "failed", found, f"set cluster: {inventory.cluster} in the site's file")


def _scratch(site: SiteFile, text: str) -> Finding:
    if not site.scratch:
        remedy = "set scratch in the site's file: a directory that login and compute nodes share"
        return Finding(site.name, "scratch", "failed", "not set", remedy)
    rows = [line.split() for line in text.splitlines() if line.strip()]
    if not rows or not rows[-1][3:4] or not rows[-1][3].isdigit():
        said = final_line(text) or "no answer"
        doing = "make room in" if FULL.search(said) else "make writable"
        return Finding(site.name, "scratch", "failed", said, f"{doing} {site.scratch}, or set another scratch")
    free_gb = int(rows[-1][3]) * 1024 / 1e9  # `df -P` has the free KiB in the fourth column
    if free_gb < FULL_GB:
        remedy = "make room there, or set another scratch"
        return Finding(site.name, "scratch", "failed", f"{site.scratch} is full: {free_gb:.1f} GB free", remedy)
    if free_gb < SCRATCH_GB:
        remedy = f"make room there, or set another scratch: weights and checkpoints want {SCRATCH_GB:.0f} GB and more"
        return Finding(site.name, "scratch", "warning", f"{free_gb:.1f} GB free in {site.scratch}", remedy)
    return Finding(site.name, "scratch", "ok", f"{free_gb:.0f} GB free in {site.scratch}")


def _setup(site: SiteFile, text: str) -> Iterator[Finding]:
    failing = [line.strip() for line in text.splitlines() if line.strip()]
    if failing:
        remedy = "correct modules and setup in the site's file; `module avail` lists the modules there"
        yield Finding(site.name, "setup", "failed", f"fails: {'; '.join(failing)}", remedy)
    elif site.setup_lines:
        yield Finding(site.name, "setup", "ok", "; ".join(site.setup_lines))


def _environment(site: SiteFile, text: str, wish: Wish) -> Iterator[Finding]:
    words = login_python_of(site)
    said = final_line(text)  # modules may print above it
    unlike = _OF_NODES_ALONE.search(said) or (site.container and "command not found" in said)
    if words is None or unlike:  # login nodes may be other machines than the nodes, or lack the container's runtime
        why = "only jobs start the container" if words is None else said
        remedy = "`hetrl doctor --deep` asks a job on the nodes: whether it starts there, and what it has"
        yield Finding(site.name, "python", "warning", f"not looked at on the login node: {why}", remedy)
        return
    try:
        found: dict[str, Any] = json.loads(said)
    except ValueError:
        remedy = f"set python in the site's file (it is {site.python})"
        if site.container:
            remedy = f"make `{shlex.join(words)}` start there, or correct container in the site's file"
        yield Finding(site.name, "python", "failed", said or "no answer", remedy)
        return
    yield from packages_found(site.name, found, wish)


def _partitions(site: SiteFile, inventory: Inventory, wish: Wish) -> Iterator[Finding]:
    known = {partition.name: partition for partition in inventory.partitions}
    names = inventory.taking_jobs(site.partitions)
    if not names:
        remedy = f"set partitions in the site's file; there are {', '.join(known)}"
        yield Finding(site.name, "partitions", "failed", "the cluster has no default partition", remedy)
    for name in names:
        what = f"partition {name}"
        if name not in known:
            remedy = f"set partitions in the site's file; there are {', '.join(known)}"
            yield Finding(site.name, what, "failed", "there is none of this name", remedy)
            continue
        partition = known[name]
        hours, asked = (partition.max_seconds or 0.0) / 3600, wish.walltime_seconds / 3600
        if not partition.up:
            yield Finding(site.name, what, "failed", "takes no jobs", "wait, or name another under partitions")
        elif partition.max_seconds is not None and partition.max_seconds < wish.walltime_seconds:
            remedy = "lower launch.walltime, or name another under partitions"
            yield Finding(site.name, what, "failed", f"allows {hours:g} h, asked {asked:g} h", remedy)
        elif partition.accounts is not None and site.account is not None and site.account not in partition.accounts:
            remedy = f"set account to one of {', '.join(partition.accounts)}"
            yield Finding(site.name, what, "failed", f"is closed to account {site.account}", remedy)
        else:
            limit = "no time limit" if partition.max_seconds is None else f"up to {hours:g} h"
            yield Finding(site.name, what, "ok", limit)


def _gpus(site: SiteFile, inventory: Inventory) -> Iterator[Finding]:
    if site.gpu_request == "none":
        yield Finding(site.name, "gpus", "ok", "Slurm knows of none; the nodes of the site's file count")
        return
    try:
        groups = node_groups(inventory, site.gres, site.partitions)
    except HetrlError as error:
        yield Finding(site.name, "gpus", "failed", str(error), "map the names under gres in the site's file")
        return
    for complaint in unmapped_gpus(inventory, site.gres, site.partitions):
        yield Finding(site.name, "gpus", "warning", complaint, "map them, or leave them out of the run as they are")
    for entry in site.nodes:
        there = sum(group.count for group in groups if group.gpu == entry.gpu and group.gpus >= entry.gpus)
        what = f"nodes {entry.name}"
        if there < entry.count:
            remedy = f"lower count of {entry.name} in the site's file, or run `hetrl discover` and plan again"
            found = f"{there} of {entry.count} nodes with {entry.gpus} x {entry.gpu} are in service"
            yield Finding(site.name, what, "failed", found, remedy)
        else:
            yield Finding(site.name, what, "ok", f"{there} nodes with {entry.gpus} x {entry.gpu} in service")
    if not groups and not site.nodes:
        yield Finding(site.name, "gpus", "failed", "no GPU node is in service", "look at `sinfo` there")


def _queue(site: SiteFile, inventory: Inventory, waiting: Part) -> Finding:
    """Say how busy the site's partitions are."""
    names = {*inventory.taking_jobs(site.partitions)}
    nodes = [node for node in inventory.nodes if node.in_service and names.intersection(node.partitions)]
    gpus = sum(sum(node.gpus.values()) for node in nodes)
    used = sum(sum(node.gpus_used.values()) for node in nodes)
    idle = sum("IDLE" in node.states for node in nodes)
    found = f"{gpus - used} of {gpus} GPUs idle" if gpus else f"{idle} of {len(nodes)} nodes idle"
    if waiting.code == 0:
        count = sum(bool(names.intersection(line.strip().split(","))) for line in waiting.text.splitlines())
        found += f", {count} job{'' if count == 1 else 's'} wait{'s' if count == 1 else ''}"
    return Finding(site.name, "queue", "ok", found)


def _egress(site: SiteFile, part: Part) -> Finding:
    target = getattr(site, site.egress)
    if part.code == 0:
        return Finding(site.name, site.egress, "ok", f"{target} answers")
    remedy = f"start it, or correct {site.egress} in the site's file"
    return Finding(site.name, site.egress, "failed", f"{target} does not answer from the login node", remedy)
