"""Slurm's commands and ssh for the fast tests: what the clients print, with a directory per cluster instead of daemons.

Called as sbatch, squeue, scancel, scontrol or ssh. FAKE_CLUSTER is the directory of one cluster, `-M NAME` is one
beside it: `jobs.json` is its queue, `calls` what was run. A file `faults/PROGRAM` makes a program misbehave; its
words are kinds of fault; `rows-down` is one for each time that it stands there.
The texts are those of Slurm 22.05.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

RECORDED = Path(__file__).resolve().parents[2] / "golden" / "slurm" / "22.05.txt"
TIMED_OUT = "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation"
REFUSED = "sbatch: error: Batch job submission failed: Invalid account or account/partition combination specified"
NO_CONTROLLER = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"
SUBMITTED = "2026-11-21T12:00:0"


def main() -> int:
    program, words = Path(sys.argv[0]).name, sys.argv[1:]
    if program == "ssh":
        return ssh(words)
    cluster = asked_cluster(Path(os.environ["FAKE_CLUSTER"]), words)
    with (cluster / "calls").open("a") as calls:
        calls.write(f"{program} {' '.join(words)}\n")
    faults = fault(cluster, program)
    if "--test-only" in words:  # of the preflight, which has a fault of its own
        faults = [kind for kind in faults if kind == "unfit"]
    if "hang" in faults:
        time.sleep(600)
    if "down" in faults:
        return complain(NO_CONTROLLER)
    if "kill-before" in faults:
        kill_launcher(cluster)
    code = {"sbatch": sbatch, "squeue": squeue, "scancel": scancel, "scontrol": scontrol}[program](
        cluster, words, faults
    )
    if "kill-after" in faults:
        kill_launcher(cluster)
    if "interrupt-after" in faults:
        kill_launcher(cluster, signal.SIGINT)
    if "cut-after" in faults:
        (cluster / "dead").touch()
    return code


def asked_cluster(own: Path, words: list[str]) -> Path:
    """Return the cluster that a command is for: the login node's own, or the one that it names."""
    if words[:1] == ["-M"]:
        return own.parent / words[1]
    script = Path(words[-1]) if words and words[-1].endswith(".sbatch") else None
    lines = script.read_text().splitlines() if script else []
    name = next((line.partition("=")[2] for line in lines if line.startswith("#SBATCH --clusters=")), own.name)
    return own.parent / name


def fault(cluster: Path, program: str) -> list[str]:
    path = cluster / "faults" / program
    return path.read_text().split() if path.exists() else []


def kill_launcher(cluster: Path, number: int = signal.SIGKILL) -> None:
    """End the launcher as a power failure would, or by Ctrl-C, once; this program and its shell go on."""
    pid = cluster.parent / "launcher"
    if pid.exists():
        os.kill(int(pid.read_text()), number)
        pid.unlink()


def complain(text: str, code: int = 1) -> int:
    print(text, file=sys.stderr)
    return code


class Queue:
    """The jobs of a cluster, for one program at a time."""

    def __init__(self, cluster: Path) -> None:
        self._path = cluster / "jobs.json"

    def __enter__(self) -> list[dict[str, str]]:
        self._lock = self._path.with_suffix(".lock").open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self._jobs = json.loads(self._path.read_text()) if self._path.exists() else []
        return self._jobs

    def __exit__(self, *_: object) -> None:
        self._path.write_text(json.dumps(self._jobs))
        self._lock.close()


def option(words: list[str], name: str) -> str:
    return next((word.partition("=")[2] for word in words if word.startswith(f"--{name}=")), "")


def sbatch(cluster: Path, words: list[str], faults: list[str]) -> int:
    if "--test-only" in words:
        sys.stdin.read()
        if "unfit" in faults:
            return complain("allocation failure: Requested node configuration is not available")
        return complain(
            "sbatch: Job 9 to start at 2026-11-21T14:00:00 using 4 processors on nodes a-n1 in partition gpu", 0
        )
    text = Path(words[-1]).read_text()
    name = next(line.partition("=")[2] for line in text.splitlines() if line.startswith("#SBATCH --job-name="))
    if "refuse" in faults or ("refuse-array" in faults and "array" in name):
        return complain(REFUSED)
    if "lost" in faults:
        return complain(TIMED_OUT)
    with Queue(cluster) as jobs:
        number = str(len(jobs) + 1)
        state = "PENDING" if "pending" in faults else "RUNNING"
        reason = "Resources" if state == "PENDING" else "None"
        jobs.append({"id": number, "name": name.strip("'\""), "state": state, "reason": reason})
    if "timeout" in faults:
        return complain(TIMED_OUT)
    named = any(line.startswith("#SBATCH --clusters=") for line in text.splitlines())
    print(f"{number};{cluster.name}" if named else number)
    return 0


def squeue(cluster: Path, words: list[str], faults: list[str]) -> int:
    names, wanted = option(words, "name").split(","), option(words, "states").split(",")
    with Queue(cluster) as jobs:
        if "--array" in words:
            if "rows-down" in faults:
                faults.remove("rows-down")
                (cluster / "faults/squeue").write_text(" ".join(faults))
                return complain(NO_CONTROLLER)
            rows = (f"{job['id']}|{job['name']}|{job['state']}" for job in jobs if job["state"] in wanted)
            print("".join(f"{row}\n" for row in rows if row.split("|")[1] in names), end="")
            return 0
        for job in jobs:
            if job["name"] in names and job["state"] != "FORGOTTEN":
                waits = job["state"] == "PENDING"
                start, nodes = ("N/A", "") if waits else (job.get("start", "2026-11-21T12:00:09"), "a-n1")
                submitted = SUBMITTED + job["id"]
                print(f"{job['id']}|{job['name']}|{job['state']}|{submitted}|{start}|{nodes}|{job['reason']}")
            if job["state"] == "COMPLETING":
                job["state"] = "CANCELLED"
    return 0


def scancel(cluster: Path, words: list[str], faults: list[str]) -> int:
    with Queue(cluster) as jobs:
        for job in jobs:
            if job["id"] == words[-1] and option(words, "signal"):  # its members end, and it holds its nodes
                job["name"] = f"held-{job['name']}"
            elif job["id"] == words[-1]:
                job["state"] = "COMPLETING" if "slow" in faults else "CANCELLED"
    return 0


def scontrol(cluster: Path, words: list[str], faults: list[str]) -> int:
    parts = dict(part.split("\n", 1) for part in RECORDED.read_text().split("@ ")[1:])
    if "update" in words:
        given = dict(word.split("=", 1) for word in words[words.index("update") + 1 :])
        with Queue(cluster) as jobs:
            for job in jobs:
                if job["id"] == given["JobId"]:
                    job["name"] = given["JobName"]
        return 0
    if words == ["ping"]:
        print("Slurmctld(primary) at a is UP")
    elif words == ["--version"]:
        print(parts["version"].strip())
    elif words[-1] == "config":
        print(parts["config"])
    else:
        print(parts.get({"partition": "partitions", "node": "nodes"}.get(words[-1], ""), ""))
    return 0


def ssh(words: list[str]) -> int:
    """Run the command here, in the cluster that is named as the host."""
    place = next(i for i, word in enumerate(words) if not word.startswith("-") and words[i - 1] not in ("-o", "-F"))
    cluster = Path(os.environ["FAKE_CLUSTERS"]) / words[place]
    if (cluster / "dead").exists():
        return complain(f"ssh: connect to host {words[place]} port 22: Connection refused", 255)
    command = " ".join(words[place + 1 :])
    with (cluster / "trips").open("a") as trips:
        trips.write(command.replace("\n", " ") + "\n")
    faults = fault(cluster, "rsync") if "&& rsync --server" in command else []
    if "kill-before" in faults:
        kill_launcher(cluster)
    home = {"HOME": str(cluster), "FAKE_CLUSTER": str(cluster)}
    code = subprocess.call(["sh", "-c", command], env={**os.environ, **home})
    if "damage" in faults:
        (Path(words[-1]) / "plan.json").write_text("{}")
    if "kill-after" in faults:
        kill_launcher(cluster)
    return code
