"""One real Slurm cluster of an ordinary user: two nodes on loopback, no root, no namespaces, no links.

    python -m lab.rootless [COMMAND...]     # a command, or a shell, in which sbatch and the others find it

GPUs are fake, as in the lab: Slurm counts them. The cluster ends with the command.
"""

from __future__ import annotations

import getpass
import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from lab.processes import SYSTEM_PATH, LabError, missing_of, wait_until
from launch.ports import free_ports

TOOLS = ("munged", "slurmctld", "slurmd")
NODES: Mapping[str, tuple[str, int]] = {"n1": ("a100", 2), "n2": ("l4", 1)}  # type and number of their GPUs
UP_SECONDS = 60

SLURM_CONF = """\
ClusterName=rootless
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthInfo=socket={directory}/munge/socket,cred_expire=10
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool-%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
PropagateResourceLimits=NONE
SlurmdParameters=config_overrides
SchedulerParameters=bf_interval=2,sched_interval=10
MpiDefault=none
GresTypes=gpu
ReturnToService=2
KillWait=5
{nodes}
PartitionName=gpu Nodes=ALL Default=YES DefaultTime=10 MaxTime=1-00:00:00 State=UP
"""
NODE = "NodeName={name} NodeHostname=localhost NodeAddr=127.0.0.1 Port={port} CPUs=16 RealMemory=64000 Gres={gres}"


@contextmanager
def rootless_cluster() -> Iterator[Mapping[str, str]]:
    """Keep a cluster up inside the `with` block; yields the environment in which Slurm's programs find it.

    Raises LabError where a daemon does not come up.
    """
    with tempfile.TemporaryDirectory(prefix="hetrl-slurm-") as name, ExitStack() as stack:
        directory = Path(name)
        _configure(directory)
        environment = {**os.environ, "SLURM_CONF": str(directory / "slurm.conf"), "PATH": SYSTEM_PATH}
        for argv in _daemons(directory):
            with (directory / "log").open("ab") as log:
                daemon = subprocess.Popen(argv, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
            stack.callback(daemon.wait, 30)
            stack.callback(daemon.terminate)
            if argv[0] == "munged":
                wait_until((directory / "munge/socket").is_socket, UP_SECONDS, (directory / "log").read_text)
        wait_until(lambda: _all_idle(environment), UP_SECONDS, (directory / "log").read_text)
        yield {**os.environ, "SLURM_CONF": environment["SLURM_CONF"]}


def _configure(directory: Path) -> None:
    directory.chmod(0o711)  # munged wants its socket within everybody's reach
    for name in ("munge", "state", "gpu"):
        (directory / name).mkdir(mode=0o711)
    key = directory / "munge/key"
    key.touch(mode=0o600)
    key.write_bytes(secrets.token_bytes(1024))
    for number in range(max(gpus for _, gpus in NODES.values())):
        (directory / f"gpu/{number}").symlink_to("/dev/null")
    controller_port, *ports = free_ports(1 + len(NODES))
    nodes, gres = [], []
    for (name, (gpu, gpus)), port in zip(NODES.items(), ports, strict=True):
        nodes.append(NODE.format(name=name, port=port, gres=f"gpu:{gpu}:{gpus}"))
        gres.append(f"NodeName={name} Name=gpu Type={gpu} File={directory}/gpu/[0-{gpus - 1}]")
    facts = {"port": controller_port, "user": getpass.getuser(), "directory": directory, "nodes": "\n".join(nodes)}
    (directory / "slurm.conf").write_text(SLURM_CONF.format(**facts))
    (directory / "gres.conf").write_text("\n".join(gres) + "\n")


def _daemons(directory: Path) -> list[list[str]]:
    """Return the commands of all daemons, in the foreground, in the order of their start."""
    munge = directory / "munge"
    munged = ["munged", "--foreground", f"--key-file={munge}/key", f"--socket={munge}/socket"]
    munged += [f"--{name}-file={munge}/{name}" for name in ("pid", "seed")]
    return [munged, ["slurmctld", "-D"], *(["slurmd", "-D", "-N", name] for name in NODES)]


def _all_idle(environment: Mapping[str, str]) -> bool:
    query = ["sinfo", "--noheader", "--Node", "--format=%T"]
    done = subprocess.run(query, env=environment, capture_output=True, text=True, timeout=UP_SECONDS, check=False)
    return done.stdout.split() == ["idle"] * len(NODES)


def main(command: Sequence[str]) -> int:
    """Run a command beside a cluster; returns its exit code."""
    if missing := missing_of(TOOLS):
        raise LabError(f"not installed: {', '.join(missing)}; `make lab-setup` installs them, as root")
    with rootless_cluster() as environment:
        return subprocess.run(list(command) or ["bash"], env=environment, check=False).returncode


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except LabError as error:
        print(f"lab: {error}", file=sys.stderr)
        sys.exit(1)
