"""Where a process stands in its island: what the launcher or Slurm wrote into its environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hetrl.errors import UsageError

_OURS = ("HETRL_RANK", "HETRL_WORLD_SIZE", "HETRL_LOCAL_RANK")
_SLURM = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")
_STORE = ("HETRL_STORE_HOST", "HETRL_STORE_PORT")


@dataclass(frozen=True)
class Island:
    """One rank of an island: its place among `size` ranks, on its node, and the island's own store."""

    rank: int
    size: int
    local_rank: int
    host: str
    port: int


def island_from_environment(env: Mapping[str, str]) -> Island:
    """Read the place of this process: HETRL_RANK, _WORLD_SIZE, _LOCAL_RANK, else Slurm's step variables.

    The store is always HETRL_STORE_HOST and HETRL_STORE_PORT. Slurm's names are those of the OUTPUT ENVIRONMENT
    VARIABLES of srun(1). Raises UsageError naming the variables that are missing or wrong.
    """
    names = _SLURM if not any(name in env for name in _OURS) and any(name in env for name in _SLURM) else _OURS
    missing = [name for name in (*names, *_STORE) if not env.get(name)]
    if missing:
        raise UsageError(
            f"the environment lacks {', '.join(missing)}; start this process with hetrl submit, or with srun and "
            "HETRL_STORE_HOST and HETRL_STORE_PORT set"
        )
    rank, size, local_rank = (_whole(env, name) for name in names)
    port = _whole(env, "HETRL_STORE_PORT")
    if not 0 <= local_rank <= rank < size:
        raise UsageError(f"{names[0]}={rank} and {names[2]}={local_rank} do not fit {names[1]}={size}")
    if not 0 < port < 65536:
        raise UsageError(f"HETRL_STORE_PORT={port} is not a port; use 1 to 65535")
    return Island(rank=rank, size=size, local_rank=local_rank, host=env["HETRL_STORE_HOST"], port=port)


def _whole(env: Mapping[str, str], name: str) -> int:
    """Read a whole number >= 0."""
    if not (env[name].isascii() and env[name].isdigit()):
        raise UsageError(f"{name}={env[name]!r} is not a whole number")
    return int(env[name])
