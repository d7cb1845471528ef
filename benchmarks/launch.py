"""Submitting to three real clusters of the lab: round trips per site, and how long acceptance takes beyond sbatch.

three clusters that share nothing but ssh, jobs of the tests of the launcher; `hetrl submit` on the head of one
for each repetition: submit, leave, cancel
ratio = seconds from the first intent in events.jsonl to the last acceptance
        / (seconds of the slowest site's own sbatch, all its jobs, timed there, + 1 s)
at once = some moment lies in the preflight of all sites, and another in what follows (copy, submission) at all sites
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from _results import ROOT, write_result

sys.path.insert(0, str(ROOT))  # the lab is among the tests

from lab.lab import Lab
from lab.launcher import NOTHING, SITES, Launcher, until_jobs
from lab.shape import JOB_USER

REPEATS = 10
TRIPS, RATIO = 6, 1.2  # to reach, at most
# What stands for sbatch in a login shell: sbatch, and a line with its seconds. --test-only is of the preflight.
SBATCH = """\
#!/bin/bash
case " $* " in *" --test-only "*) exec /usr/bin/sbatch "$@" ;; esac
start=$EPOCHREALTIME
/usr/bin/sbatch "$@"
code=$?
echo "$start $EPOCHREALTIME" >>~/sbatch.seconds
exit "$code"
"""


def time_sbatch(lab: Lab, site: str) -> None:
    """Let the login shells of a site note how long sbatch takes."""
    directory = lab.home(site) / "timed"
    directory.mkdir()
    (directory / "sbatch").write_text(SBATCH)
    (directory / "sbatch").chmod(0o755)
    (lab.home(site) / ".bash_profile").write_text(f"PATH=/home/{JOB_USER}/timed:$PATH\n")


def sbatch_seconds(lab: Lab, site: str) -> float:
    """Return how long the site was at sbatch since the last call."""
    path = lab.home(site) / "sbatch.seconds"
    spans = [[float(moment) for moment in line.split()] for line in path.read_text().splitlines()]
    path.unlink()
    return sum(end - start for start, end in spans)


def submit_once(lab: Lab, number: int) -> dict[str, Any]:
    """Submit a run, and return what it took."""
    launcher = Launcher(lab, f"run-{number}")
    # -P: beside that script, this file would be found as the package `launch`
    process = launcher.python("-P", str(ROOT / "benchmarks" / "_launch_submit.py"))
    stdout, stderr = process.communicate()
    if process.returncode:
        raise RuntimeError(f"the submission failed: {stderr}")
    trips = json.loads(stdout.splitlines()[-1])["trips"]
    events = [json.loads(line) for line in (launcher.run / "events.jsonl").read_text().splitlines()]
    moments = {
        kind: [event["time"] for event in events if event["kind"] == kind] for kind in ("submitting", "submitted")
    }
    slowest = max(sbatch_seconds(lab, site) for site in SITES)
    accepted = max(moments["submitted"]) - min(moments["submitting"])
    for site in SITES:
        lab.run(site, ["scancel", f"--user={JOB_USER}"])
    until_jobs(lab, NOTHING)
    return {
        "trips": {site: sum(trip["site"] == site for trip in trips) for site in SITES},
        "at_once": at_once(trips, 0, 0) and at_once(trips, 1, -1),
        "accepted_seconds": accepted,
        "sbatch_seconds": slowest,
        "ratio": accepted / (slowest + 1.0),
    }


def at_once(trips: Sequence[Mapping[str, Any]], first: int, last: int) -> bool:
    """Return whether some moment lies between the start of this round trip and the end of that one at every site."""
    by_site = [[trip for trip in trips if trip["site"] == site] for site in SITES]
    return bool(max(own[first]["start"] for own in by_site) < min(own[last]["end"] for own in by_site))


def main() -> None:
    """Submit some times, write the result."""
    if os.geteuid() != 0:
        sys.exit("this benchmark runs on the lab, which needs root (docs/lab.md)")
    load = os.getloadavg()[0]  # what else the machine had to do
    with Lab(slurm=True) as lab:
        for site in SITES:
            time_sbatch(lab, site)
        submit_once(lab, 0)  # not counted: what it compiles and connects stays
        rows = []
        for number in range(1, REPEATS + 1):
            rows.append(submit_once(lab, number))
            print(rows[-1], flush=True)
    trips = max(count for row in rows for count in row["trips"].values())
    ratios = [row["ratio"] for row in rows]
    reached = trips <= TRIPS and all(row["at_once"] for row in rows) and statistics.median(ratios) <= RATIO
    write_result(
        "launch",
        {"seed": 0, "load_before": load, "rows": rows, "reached": reached},
        page(rows, trips, ratios, load, reached),
    )


def page(rows: Sequence[Mapping[str, Any]], trips: int, ratios: Sequence[float], load: float, reached: bool) -> str:
    """Return the benchmark's part of the page."""
    apart = sum(not row["at_once"] for row in rows)
    accepted = sorted(row["accepted_seconds"] for row in rows)
    own = sorted(row["sbatch_seconds"] for row in rows)
    lines = [
        f"`hetrl submit` on three real clusters that share nothing but ssh, {len(rows)} times, links of 5 and 10 ms "
        f"one way. To reach: at most {TRIPS} round trips per site, all sites at the same time in "
        f"the preflight and in what follows, and after the preflight at most {RATIO:g} times the slowest site's own "
        f"sbatch and one second; {'reached' if reached else 'not reached'}. All clusters share this machine's cores, "
        f"which had a load of {load:.1f} besides.",
        "",
        "| figure | median | worst |",
        "| --- | --- | --- |",
        f"| round trips per site | | {trips} |",
        f"| submissions in which the sites were not all at work at once | | {apart} |",
        f"| intent to acceptance, s | {statistics.median(accepted):.2f} | {accepted[-1]:.2f} |",
        f"| sbatch at the slowest site, s | {statistics.median(own):.2f} | {own[-1]:.2f} |",
        f"| ratio | {statistics.median(ratios):.2f} | {max(ratios):.2f} |",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
