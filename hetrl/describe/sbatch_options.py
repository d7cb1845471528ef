"""Options of sbatch that a site's file must leave alone: of an option that is there twice, the last one counts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

# By these a run finds its jobs and their files again.
OWN = ("array", "chdir", "error", "hold", "job-name", "nodes", "output", "parsable", "requeue", "test-only", "wrap")
# These have a key of their own, which says it to the planner as well.
KEYED = {
    **{"account": "account", "clusters": "cluster", "partition": "partitions", "qos": "qos"},
    **{"time": "launch.walltime"},
}


def refuse_options(key: str, options: Sequence[str], taken: Iterable[str]) -> None:
    """Raise ValueError where an option of these is a taken one; sbatch takes any beginning of a name for it."""
    for option in options:
        name = option.removeprefix("--").partition("=")[0]
        for own in (own for own in taken if own.startswith(name)):
            instead = f"write it under `{KEYED[own]}`" if own in KEYED else "it is set for each job"
            raise ValueError(f"{key}: {option}: take it out, {instead}")
