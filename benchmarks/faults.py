"""What comes of a fault: each part of a run is killed, or stands still, in each phase of it, with real engines.

an undisturbed run of a dozen steps over three sites; then, for each cell of the matrix:
    the same run until it is in the phase; SIGKILL or SIGSTOP, perhaps for a while, to every process of the part
    what came of it by itself (a launcher follows, with `launch.restarts`), how long until the next step was done,
    how many steps were taken again, and whether all rewards are those of the undisturbed run
A launcher that is killed is followed by `hetrl resume`, as its user would do. A bench that is stopped goes on where it
was with the same --kept.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from _fault_cells import CELLS, GONE, MAIN, STEPS, Cell, Found, Undisturbed, play, undisturbed
from _fault_runs import LAB, TWO_TRAIN, Clusters, Place, sometimes_right, three_clusters
from _results import write_result

from hetrl.files import append_line, read_lines


def row_of(found: Found) -> str:
    """Return a cell's row of the table."""
    cell = found.cell
    given_up, seconds = ("-" if one is None else f"{one:.1f} s" for one in (found.given_up, found.seconds))
    again = "-" if found.taken_again is None else f"{found.taken_again}"
    same = {True: "yes", False: "NO", None: "-"}[found.same]
    return (
        f"| {cell.part} | {cell.fault} | {cell.phase} | {found.outcome} | {given_up} | {seconds} | {again} | {same} |"
    )


def page(found: list[Found], plain: Undisturbed, clusters: bool) -> tuple[str, dict[str, object]]:
    """Return the benchmark's part of the page, and the figures."""
    finished = [one for one in found if one.finished]
    figures = {
        "cells": len(found),
        "finished": len(finished),
        "same": sum(bool(one.same) for one in finished),
        "outcomes": dict(Counter(one.outcome for one in found)),
    }
    where = "on three Slurm clusters" if clusters else "over three sites"
    lines = [
        f"{len(found)} faults, each in a run of {STEPS} steps {where} (two replicas draw, a checkpoint "
        f"every second step; an iteration takes {plain.iteration_seconds:.1f} s): "
        f"{len(finished)} of the runs come to their end by themselves, {figures['same']} of them with the rewards of a "
        "run without faults. A fault before the first step is told, and ends the run: nothing is lost with it. Given "
        "up: until the run was, where another goes on. Next step: until it was done. Again: steps that were taken once "
        "more.",
        "",
        "| part | fault | phase | what came of it | given up | next step | again | same rewards |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
        *map(row_of, found),
    ]
    return "\n".join(lines), figures


def kept(path: Path | None) -> list[Found]:
    """Return what a bench that was stopped has found."""
    rows = read_lines(path) if path else []
    return [Found(**{**row, "cell": Cell(**row["cell"])}) for row in rows]


@contextmanager
def places(clusters: bool) -> Iterator[tuple[Callable[[str, bool], Place], dict[str, Any]]]:
    """Give what makes a place for a run of this name (which may lose a site), and the sections of the experiments."""
    if clusters:
        with three_clusters() as lab:
            yield lambda name, loses: Clusters(lab, name, TWO_TRAIN if loses else LAB), {}
        return
    with tempfile.TemporaryDirectory(prefix="hetrl-faults-") as work:
        yield (lambda name, _: Place(Path(work) / name)), sometimes_right(Path(work))


def main() -> None:
    """Play all cells, write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--clusters", action="store_true", help="the main ones, on three real Slurm clusters (root)")
    parser.add_argument("--part", action="append", help="only this one (may be repeated); nothing is written")
    parser.add_argument("--phase", action="append", help="only this one (may be repeated); nothing is written")
    parser.add_argument("--kept", type=Path, help="a file for what is found, for a bench that is stopped")
    arguments = parser.parse_args()
    cells = [
        cell
        for cell in (MAIN if arguments.clusters else CELLS)
        if cell.part in (arguments.part or [cell.part]) and cell.phase in (arguments.phase or [cell.phase])
    ]
    before = {one.cell: one for one in kept(arguments.kept)}
    with places(arguments.clusters) as (place, changes):
        plain = undisturbed(place("undisturbed", False), changes)
        found = []
        for number, cell in enumerate(cells):
            found.append(before.get(cell) or play(cell, place(f"cell-{number}", cell.fault == GONE), changes, plain))
            print(row_of(found[-1]), flush=True)
            if arguments.kept and cell not in before:
                append_line(arguments.kept, asdict(found[-1]))
    table, figures = page(found, plain, arguments.clusters)
    if not (arguments.part or arguments.phase):
        rows = [asdict(one) for one in found]
        name = "faults-clusters" if arguments.clusters else "faults"
        write_result(name, {**figures, "iteration_seconds": plain.iteration_seconds, "faults": rows}, table)
    print(table)


if __name__ == "__main__":
    main()
