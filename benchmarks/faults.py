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
from dataclasses import asdict
from pathlib import Path

from _fault_cells import CELLS, STEPS, Cell, Found, Undisturbed, play, undisturbed
from _results import write_result

from hetrl.files import append_line, read_lines


def row_of(found: Found) -> str:
    """Return a cell's row of the table."""
    cell, seconds = found.cell, "-" if found.seconds is None else f"{found.seconds:.1f} s"
    again = "-" if found.taken_again is None else f"{found.taken_again}"
    same = {True: "yes", False: "NO", None: "-"}[found.same]
    return f"| {cell.part} | {cell.fault} | {cell.phase} | {found.outcome} | {seconds} | {again} | {same} |"


def page(found: list[Found], plain: Undisturbed) -> tuple[str, dict[str, object]]:
    """Return the benchmark's part of the page, and the figures."""
    finished = [one for one in found if one.finished]
    figures = {
        "cells": len(found),
        "finished": len(finished),
        "same": sum(bool(one.same) for one in finished),
        "outcomes": dict(Counter(one.outcome for one in found)),
    }
    lines = [
        f"{len(found)} faults, each in a run of {STEPS} steps over three sites (the quickstart, one rank trains, two "
        f"replicas draw, a checkpoint every second step; an iteration takes {plain.iteration_seconds:.1f} s): "
        f"{len(finished)} of the runs come to their end by themselves, {figures['same']} of them with the rewards of a "
        "run without faults. A fault before the first step is told, and ends the run: nothing is lost with it. Next "
        "step: until it was done. Again: steps that were taken once more.",
        "",
        "| part | fault | phase | what came of it | next step | again | same rewards |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        *map(row_of, found),
    ]
    return "\n".join(lines), figures


def kept(path: Path | None) -> list[Found]:
    """Return what a bench that was stopped has found."""
    rows = read_lines(path) if path and path.exists() else []
    return [Found(**{**row, "cell": Cell(**row["cell"])}) for row in rows]


def main() -> None:
    """Play all cells, write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--part", action="append", help="only this one (may be repeated); nothing is written")
    parser.add_argument("--kept", type=Path, help="a file for what is found, for a bench that is stopped")
    parser.add_argument("--phase", action="append", help="only this one (may be repeated); nothing is written")
    arguments = parser.parse_args()

    def asked(cell: Cell) -> bool:
        return cell.part in (arguments.part or [cell.part]) and cell.phase in (arguments.phase or [cell.phase])

    with tempfile.TemporaryDirectory(prefix="hetrl-faults-") as work:
        plain = undisturbed(Path(work) / "undisturbed")
        before = {one.cell: one for one in kept(arguments.kept)}
        found = []
        for number, cell in enumerate(filter(asked, CELLS)):
            found.append(before.get(cell) or play(cell, Path(work) / str(number), plain))
            print(row_of(found[-1]), flush=True)
            if arguments.kept and cell not in before:
                append_line(arguments.kept, asdict(found[-1]))
    table, figures = page(found, plain)
    if not (arguments.part or arguments.phase):
        rows = [asdict(one) for one in found]
        write_result("faults", {**figures, "iteration_seconds": plain.iteration_seconds, "faults": rows}, table)
    print(table)


if __name__ == "__main__":
    main()
