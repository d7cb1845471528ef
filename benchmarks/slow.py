"""A replica whose link gets slow, or that is started again behind it: what others wait for a version, and it for all.

a trainer at one site publishes a version every few seconds to a replica at each of two others
    all links fast; one of them slow; a version behind it of which all weights changed; a replica behind it that is
    started again, and needs the full set
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from _results import ROOT, write_result
from _slow_member import CONTROLLER, MODEL_BYTES

from hetrl.runtime.emulated.weights import CHANGED
from hetrl.runtime.rl.serving import LEAST_PATIENCE_SECONDS
from lab.worlds.gateways import MEMBERS, SITES, LabSites, Shape, open_lab, order, reply_of

FAST, SLOW = Shape(0.4, 25.0, 0.0), Shape(0.016, 25.0, 0.0)
EVERY_SECONDS = 5.0
USUAL, LONG = 6, 30  # versions
NEAR, FAR = "beta/actor_generation/0", "gamma/actor_generation/0"

Row = Mapping[str, Any]


class Phases:
    """The run, phase by phase."""

    def __init__(self, sites: LabSites) -> None:
        self._sites = sites
        self._script = str(ROOT / "benchmarks" / "_slow_member.py")
        self._near, self._far = self._start("beta", NEAR), self._start("gamma", FAR)
        for replica in (self._near, self._far):
            reply_of(replica)
        self._lead = self._start("alpha", NEAR, FAR)
        self.rows: list[dict[str, Any]] = []

    def _start(self, site: str, *replicas: str) -> Any:
        return self._sites.start(site, [sys.executable, self._script, self._sites.endpoints[site], *replicas])

    def publish(self, name: str, versions: int, *, others: bool = False) -> None:
        """Publish versions, in the first of which all weights may be `others`, and note the phase if it has a name."""
        order(self._lead, [versions, EVERY_SECONDS, others])
        found = reply_of(self._lead)
        if name:
            self.rows.append(summary_of(name, found))
            print(self.rows[-1], file=sys.stderr, flush=True)

    def restart_far(self) -> None:
        """Kill the replica behind the slow link, and start it again."""
        os.killpg(self._far.pid, signal.SIGKILL)
        self._far.wait()
        self._far = self._start("gamma", FAR)
        reply_of(self._far)
        order(self._lead, [FAR])
        reply_of(self._lead)


def summary_of(name: str, found: Sequence[Row]) -> dict[str, Any]:
    """Return what a phase showed."""
    behind = [row for row in found if FAR not in row["in_step"]]
    return {
        "phase": name,
        "versions": len(found),
        "median_seconds": statistics.median(row["seconds"] for row in found),
        "worst_seconds": max(row["seconds"] for row in found),
        "versions_behind": len(behind),
        "behind_seconds": behind[-1]["at_seconds"] - behind[0]["at_seconds"] if behind else 0.0,
        "there_at_last": FAR in found[-1]["in_step"],
    }


def measure() -> list[dict[str, Any]]:
    """Play all phases."""
    with tempfile.TemporaryDirectory() as work, open_lab() as (lab, stack):
        sites = LabSites(lab, Path(work), stack, members=[*MEMBERS, CONTROLLER])
        sites.shape(FAST)
        phases = Phases(sites)
        phases.publish("", 2)
        phases.publish("all links fast", USUAL)
        lab.link(SITES[0], SITES[2], SLOW.gbps, SLOW.delay_ms, SLOW.loss)
        phases.publish("one link slow", USUAL)
        phases.publish("one link slow, all weights change once", LONG, others=True)
        phases.restart_far()
        phases.publish("one link slow, the replica there is started again", LONG)
        return phases.rows


def main() -> None:
    """Run, write the result."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None).parse_args()
    rows = measure()
    lines = [
        f"Versions of {MODEL_BYTES // 10**6} MB, of whose words {CHANGED:.1%} change, every {EVERY_SECONDS:.0f} s, "
        f"from a trainer to a replica at each of two other sites, over links of {FAST}; slow: the link of one has "
        f"{SLOW}, over which a full set takes {MODEL_BYTES * 8e-9 / SLOW.gbps:.0f} s. Seconds: what the run waits for "
        f"a version; behind: how many versions the replica there did not have when the run went on, and for how long. "
        f"Who holds a version up is waited for for {LEAST_PATIENCE_SECONDS:.0f} s (or twice the planned time), once.",
        "",
        "| phase | versions | median | worst | behind | for | has the newest at last |",
        "| --- " * 7 + "|",
        *(
            f"| {row['phase']} | {row['versions']} | {row['median_seconds']:.2f} s | {row['worst_seconds']:.2f} s "
            f"| {row['versions_behind']} | {row['behind_seconds']:.0f} s | {'yes' if row['there_at_last'] else 'NO'} |"
            for row in rows
        ),
    ]
    write_result("slow", {"seed": 0, "rows": rows}, "\n".join(lines))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
