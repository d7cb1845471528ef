"""Slurm in a lab: one real cluster per site, as strangers, with one slurmdbd, or as a federation.

Strangers share nothing: a munge key each, no accounting, job ids that collide. With accounting, all have one key, and
MariaDB and slurmdbd run on the head of the first site.
"""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from lab import accounting as database
from lab.processes import wait_until
from lab.shape import Pod, Site, all_pods

if TYPE_CHECKING:
    from lab.lab import Lab

CONTROLLER_PORT, NODE_PORT = 6817, 6818
# What clusters with a shared slurmdbd need of each other, through the packet filter.
SHARED_PORTS = (CONTROLLER_PORT, database.PORT)
UP_SECONDS = 60

# Timeouts are short, so that tests of failures take seconds. Slurm's defaults: SlurmdTimeout 300, MessageTimeout 10,
# KillWait 30, cred_expire 120 (a requeued job starts that much later). MinJobAge is long, so that finished jobs stay
# visible without sacct. With config_overrides a node may claim more CPUs and memory than this machine has.
SLURM_CONF = """\
ClusterName={site}
SlurmctldHost={site}({address})
SlurmctldPort={controller_port}
SlurmdPort={node_port}
SlurmUser=slurm
SlurmdUser=root
AuthType=auth/munge
AuthInfo=cred_expire=10
CredType=cred/munge
StateSaveLocation={directory}/state/{site}
SlurmdSpoolDir={directory}/spool/%n
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmctldLogFile={directory}/log/slurmctld-{site}.log
SlurmdLogFile={directory}/log/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerCPU=500
MpiDefault=none
PropagateResourceLimits=NONE
ReturnToService=2
SlurmdParameters=config_overrides
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=5,bf_window=1440,bf_continue,sched_interval=10
PriorityType=priority/multifactor
MinJobAge=3600
SlurmdTimeout=20
MessageTimeout=5
KillWait=5
BatchStartTimeout=10
UnkillableStepTimeout=20
{accounting}
{nodes}
PartitionName=gpu Nodes=ALL Default=YES DefaultTime=10 MaxTime=1-00:00:00 State=UP
PartitionName=short Nodes=ALL MaxTime=00:30:00 PriorityTier=10 State=UP
"""


def slurm_conf(directory: Path, sites: Mapping[str, Site], name: str, accounting: str) -> str:
    """Return slurm.conf of one site."""
    site, machines = sites[name], all_pods(sites)
    nodes = [pod for pod in machines.values() if pod.site == name and not pod.is_head]
    types = ",".join(sorted({f"gres/gpu:{each.gpu}" for each in sites.values()}))
    lines = ["AccountingStorageType=accounting_storage/none"]
    if accounting != "none":
        host = machines[next(iter(sites))].address
        lines = [f"AccountingStorageHost={host}", f"AccountingStoragePort={database.PORT}"]
        lines += ["AccountingStorageType=accounting_storage/slurmdbd", f"AccountingStorageTRES=gres/gpu,{types}"]
    if accounting == "federation":
        lines.append("FederationParameters=fed_display")
    resources = f"CPUs={site.cpus_per_node} RealMemory=64000"
    if site.gres:
        lines.append("GresTypes=gpu")
        resources += f" Gres=gpu:{site.gpu}:{site.gpus_per_node} Feature={site.gpu}"
    return SLURM_CONF.format(
        site=name,
        address=machines[name].address,
        directory=directory,
        controller_port=CONTROLLER_PORT,
        node_port=NODE_PORT,
        accounting="\n".join(lines),
        nodes="\n".join(f"NodeName={pod.name} NodeAddr={pod.address} {resources} State=UNKNOWN" for pod in nodes),
    )


def gres_conf(site: Site) -> str:
    """Return gres.conf of one site; the files are links that pod.sh makes."""
    return f"Name=gpu Type={site.gpu} File=/run/gpu/nvidia[0-{site.gpus_per_node - 1}]\n"


def configure(directory: Path, sites: Mapping[str, Site], accounting: str) -> None:
    """Write each site's /etc/slurm and munge key, and make the directories of the daemons."""
    shared_key = secrets.token_bytes(1024)
    first = next(iter(sites))
    (directory / "log").chmod(0o1777)
    for name in all_pods(sites):
        (directory / "spool" / name).mkdir(parents=True)
    for name, site in sites.items():
        etc, state, munge = directory / "slurm" / name, directory / "state" / name, directory / "munge" / name
        etc.mkdir()
        (etc / "slurm.conf").write_text(slurm_conf(directory, sites, name, accounting))
        (etc / "gres.conf").write_text(gres_conf(site) if site.gres else "")
        state.mkdir(parents=True)
        shutil.chown(state, "slurm", "slurm")
        key = munge / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(1024) if accounting == "none" else shared_key)
        for path in (munge, key):
            shutil.chown(path, "munge", "munge")
    if accounting != "none":
        database.configure(directory, first, all_pods(sites)[first].address)


def start(lab: Lab) -> None:
    """Start all daemons and return when every node takes jobs."""
    for site in lab.sites:
        munged = [f"--{name}-file=/run/munge/munged.{name}" for name in ("pid", "log", "seed")]
        lab.run(site, ["munged", "--key-file=/run/munge/munge.key", *munged], user="munge")
    if lab.accounting != "none":
        database.start(lab)
    for site in lab.sites:
        lab.run(site, ["slurmctld"], user="root")
    nodes = [pod for pod in lab.pods.values() if not pod.is_head]
    for pod in nodes:
        lab.run(pod.name, ["slurmd"], user="root")
    for pod in nodes:
        _wait_usable(lab, pod)
    if lab.accounting != "none":
        database.wait_registered(lab)


def start_node(lab: Lab, pod: Pod) -> None:
    """Start slurmd of a node that was off; return when the controller may use it."""
    lab.run(pod.name, ["slurmd"], user="root")
    _wait_usable(lab, pod)


def _wait_usable(lab: Lab, pod: Pod) -> None:
    query = ["sinfo", "--local", "--noheader", f"--nodes={pod.name}", "--partition=gpu", "--format=%T"]

    def usable() -> bool:
        return lab.run(pod.site, query, check=False).stdout.strip() in ("idle", "mixed", "allocated")

    wait_until(usable, UP_SECONDS, lambda: f"{pod.name} takes no jobs; slurmd says:\n{lab.log(f'slurmd-{pod.name}')}")
