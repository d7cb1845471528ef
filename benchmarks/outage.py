"""An outage of a link between two sites: how long after its end a version that was under way is there, and the next.

Everything between the sites is dropped, in silence, from the moment at which a quarter of a version has crossed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from _results import ROOT, write_result

from lab.worlds.gateways import SITES, Shape, lab_sites, order, reply_of

SHAPE = Shape(0.4, 25.0, 0.0)
SIZE_MB = 64
OUTAGES_SECONDS = (5, 30, 120)
TRAINER, REPLICA = "alpha/actor_training/0", "beta/actor_generation/0"


def measure(outages_seconds: list[int]) -> list[dict[str, Any]]:
    """Publish a version over each outage, and one after it."""
    script = str(ROOT / "benchmarks" / "_sync_member.py")
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as work, lab_sites(Path(work)) as sites:
        taking = sites.start("beta", [sys.executable, script, REPLICA, sites.endpoints["beta"]])
        publishing = sites.start("alpha", [sys.executable, script, TRAINER, sites.endpoints["alpha"], REPLICA])
        sites.shape(SHAPE)

        def publish() -> float:
            start = time.monotonic()
            order(publishing, [SIZE_MB * 10**6, 1, False])
            reply_of(publishing)
            return time.monotonic() - start

        publish()
        usual_seconds = publish()
        for outage_seconds in outages_seconds:
            healed: list[float] = []

            def interrupt(seconds: float = outage_seconds, healed: list[float] = healed) -> None:
                time.sleep(usual_seconds / 4)
                sites.cut(*SITES[:2])
                time.sleep(seconds)
                sites.heal(*SITES[:2])
                healed.append(time.monotonic())

            interrupting = threading.Thread(target=interrupt)
            interrupting.start()
            publish()
            interrupting.join()
            back_seconds = time.monotonic() - healed[0]
            row = {"outage_seconds": outage_seconds, "usual_seconds": usual_seconds, "back_seconds": back_seconds}
            rows.append({**row, "next_seconds": publish()})
            print(rows[-1], file=sys.stderr, flush=True)
        assert taking.poll() is None
    return rows


def main() -> None:
    """Run all, write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--outages", type=int, nargs="+", default=list(OUTAGES_SECONDS), help="seconds")
    rows = measure(parser.parse_args().outages)
    lines = [
        f"A full set of weights of {SIZE_MB} MB over {SHAPE}, from a trainer to a replica at another site, and an "
        "outage that begins when a quarter of it has crossed. Usual: seconds of a version without an outage; back: "
        "from the end of the outage to the word that the version is there whole; next: seconds of the version after "
        "it. A connection that was silent for 15 s is closed and made anew, so that nothing waits for TCP's backoff.",
        "",
        "| outage | usual | back after | next |",
        "| --- " * 4 + "|",
    ]
    lines += [
        f"| {row['outage_seconds']} s | {row['usual_seconds']:.1f} s | {row['back_seconds']:.1f} s "
        f"| {row['next_seconds']:.1f} s |"
        for row in rows
    ]
    write_result("outage", {"seed": 1, "rows": rows}, "\n".join(lines))


if __name__ == "__main__":
    main()
