"""Where a process of a job step stands in its island, as MPI or Slurm says.

PMI_RANK, PMIX_RANK   of `srun --mpi=pmi2|pmix`: MPI counts, and broadcasts the address of rank 0
SLURM_PROCID ...      of a plain srun; rank 0 leaves its address in a file of a directory that all nodes share
"""

from __future__ import annotations

import importlib.util
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from hetrl.errors import UsageError
from hetrl.runtime.transport.rendezvous import free_port, meet, node_address

MEET_SECONDS = 120.0  # until rank 0 has left its address
_SLURM = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")
_PMI = ("PMI_RANK", "PMIX_RANK")


@dataclass(frozen=True)
class IslandRank:
    """One rank of an island: its place among `size` ranks, on its node, and where rank 0 serves.

    The ranks of a node follow each other, as the ranks of a site do among those of all sites.
    """

    rank: int
    size: int
    local_rank: int
    host: str
    port: int


def started_by_mpi(env: Mapping[str, str]) -> bool:
    """Return whether srun prepared MPI for this process, and mpi4py is there to use it."""
    return any(name in env for name in _PMI) and importlib.util.find_spec("mpi4py") is not None


def island_from_environment(
    env: Mapping[str, str], directory: Path, interface: str | None = None, timeout_seconds: float = MEET_SECONDS
) -> IslandRank:
    """Return the place of this process (collective where MPI started it).

    Rank 0 serves at its node's address, of `interface` if one is named, and a free port; of a plain srun it says so in
    a file of `directory`. Slurm's names are those of the OUTPUT ENVIRONMENT VARIABLES of srun(1). Raises UsageError
    naming the variables that are missing or wrong, or the nodes whose ranks are mixed, and GangTimeoutError where rank
    0 does not say where it is.
    """
    if started_by_mpi(env):
        return _from_mpi(interface)
    if missing := [name for name in _SLURM if not env.get(name)]:
        raise UsageError(f"the environment lacks {', '.join(missing)}; start this process with srun")
    rank, size, local_rank = (_whole(env, name) for name in _SLURM)
    if not 0 <= local_rank <= rank < size:
        raise UsageError(f"{_SLURM[0]}={rank} and {_SLURM[2]}={local_rank} do not fit {_SLURM[1]}={size}")
    return IslandRank(rank, size, local_rank, *_met(env, rank, directory, interface, timeout_seconds))


def _whole(env: Mapping[str, str], name: str) -> int:
    """Read a whole number >= 0."""
    if not (env[name].isascii() and env[name].isdigit()):
        raise UsageError(f"{name}={env[name]!r} is not a whole number")
    return int(env[name])


def _met(
    env: Mapping[str, str], rank: int, directory: Path, interface: str | None, timeout_seconds: float
) -> tuple[str, int]:
    """Return the address of rank 0, which leaves it in a file of this step."""
    step = ".".join(env.get(name, "0") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    path, whose = directory / f"island-{step}.endpoint", "rank 0 of the step"
    return meet(path, serves=rank == 0, timeout_seconds=timeout_seconds, whose=whose, interface=interface)


def _from_mpi(interface: str | None) -> IslandRank:
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    check_contiguous(world.allgather(socket.gethostname()))
    local_rank = world.Split_type(MPI.COMM_TYPE_SHARED).Get_rank()
    served = None
    if world.Get_rank() == 0:
        host = node_address(interface)
        served = (host, free_port(host))
    host, port = world.bcast(served, root=0)
    return IslandRank(world.Get_rank(), world.Get_size(), local_rank, host, port)


def check_contiguous(hosts: Sequence[str]) -> None:
    """Raise UsageError where the ranks of a node do not follow each other; `hosts` are those of all ranks in order.

    Mixed ranks send between nodes what could stay inside one.
    """
    runs = [host for host, _ in groupby(hosts)]
    if mixed := sorted({host for host in runs if runs.count(host) > 1}):
        raise UsageError(f"the ranks of {', '.join(mixed)} are mixed with others; use srun --distribution=block")
