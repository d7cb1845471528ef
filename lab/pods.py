"""Pods: the machines of a lab as processes in namespaces, below one process whose end ends them all.

sh              removes the run directory when the rest is gone
`- unshare      a process namespace for the whole lab
   `- cat       the warden, process 1 there; ends when the keeper of the lab closes its pipe, or dies
   `- nsenter, unshare, pod.sh      one per pod; pod.sh is process 1 of the pod
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from lab.processes import LabError, environment_of, only_child_of, start_of
from lab.shape import JOB_USER, JOB_USER_ID, Pod, Site, hosts_file

POD_INIT = Path(__file__).with_name("pod.sh")
WARDEN = 'unshare --pid --fork --kill-child sh -c "echo ready; exec cat >/dev/null"; rm -rf -- "$1"'
CLOSE_SECONDS, DOWN_SECONDS = 3, 30
CONGESTION_CONTROL = "cubic"  # Linux's default, whatever this machine has: links behave alike everywhere


@contextmanager
def warden(directory: Path) -> Iterator[int]:
    """Give the process id of a lab's warden; at the end kill all of the lab and remove its run directory."""
    process = subprocess.Popen(
        ["sh", "-c", WARDEN, "sh", str(directory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=environment_of("root", {}),
        cwd="/",
    )
    assert process.stdin and process.stdout
    with process, process.stdin:
        wait_ready(process, "the warden", None)
        pid = only_child_of(only_child_of(process.pid))
        try:
            yield pid
        finally:
            process.stdin.close()
            try:
                process.wait(CLOSE_SECONDS)
            except subprocess.TimeoutExpired:  # a process that was forked from this one holds the pipe too
                kill_process(pid, start_of(pid))


def wait_ready(process: subprocess.Popen[str], name: str, log: Path | None) -> None:
    """Wait until a started process says that it is ready; raises LabError with its log when it ends instead."""
    assert process.stdout
    with process.stdout:
        if process.stdout.readline() != "ready\n":
            raise LabError(f"{name} did not start: {log.read_text() if log else ''}")


def write_files(directory: Path, sites: Mapping[str, Site]) -> None:
    """Write what the pods find in /etc, and make the directories that they share with this machine."""
    directory.chmod(0o755)
    for name in ("etc", "log", "pods", "home", "munge", "slurm"):
        (directory / name).mkdir()
    for site in sites:
        (directory / "munge" / site).mkdir()
        home = directory / "home" / site / JOB_USER
        home.mkdir(parents=True, mode=0o755)
        os.chown(home, JOB_USER_ID, JOB_USER_ID)
    etc = directory / "etc"
    (etc / "hosts").write_text(hosts_file(sites))
    (etc / "nsswitch.conf").write_text("passwd: files\ngroup: files\nshadow: files\nhosts: files\n")
    # "*": no password, and not locked either, which would lock keys out too.
    account = {
        "passwd": f"{JOB_USER}:x:{JOB_USER_ID}:{JOB_USER_ID}::/home/{JOB_USER}:/bin/bash\n",
        "group": f"{JOB_USER}:x:{JOB_USER_ID}:\n",
        "shadow": f"{JOB_USER}:*:19000:0:99999:7:::\n",
    }
    for name, line in account.items():
        shutil.copy2(f"/etc/{name}", etc / name)
        own = [other for other in (etc / name).read_text().splitlines(True) if not other.startswith(f"{JOB_USER}:")]
        (etc / name).write_text("".join([*own, line]))


def start(
    directory: Path, warden_pid: int, pods: Sequence[Pod], visible: Sequence[Path]
) -> list[subprocess.Popen[str]]:
    """Start pods, all at once, and note their process ids; they have no network yet but loopback."""
    started = []
    for pod in pods:
        log = directory / "log" / f"pod-{pod.name}.log"
        command = ["unshare", "--net", "--uts", "--mount", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc"]
        command += [str(POD_INIT), str(directory), pod.name, pod.site, str(pod.gpus), *map(str, visible)]
        started.append((pod, start_inside(warden_pid, command, log, stdout=subprocess.PIPE), log))
    for pod, process, log in started:
        wait_ready(process, pod.name, log)
        (directory / "pods" / pod.name).write_text(str(only_child_of(only_child_of(process.pid))))
    return [process for _, process, _ in started]


def start_inside(
    warden_pid: int, command: Sequence[str], log: Path, stdout: int | None = None
) -> subprocess.Popen[str]:
    """Start a command that ends with the warden, its messages in `log`."""
    with log.open("a") as file:
        return subprocess.Popen(
            ["nsenter", f"--target={warden_pid}", "--pid", *command],
            stdin=subprocess.DEVNULL,
            stdout=file if stdout is None else stdout,
            stderr=file,
            text=True,
            start_new_session=True,
            env=environment_of("root", {}),
            cwd="/",
        )


def kill(directory: Path, pod: Pod) -> None:
    """Kill all processes of a pod."""
    note = directory / "pods" / pod.name
    pid = int(note.read_text())
    note.unlink()
    kill_process(pid, start_of(pid))


def kill_process(pid: int, start: str | None) -> None:
    """Kill a process if it is still the one that started then."""
    if start is not None and start_of(pid) == start:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


# --- the network: what `ip -batch -` reads ----------------------------------------------------------------------------


def in_network(pid: int, *command: str) -> list[str]:
    """Return a command to run in the network of a pod, with the files of this machine."""
    return ["nsenter", f"--target={pid}", "--net", *command]


def cable(pod: Pod) -> str:
    """Return the head's interface to a node; interface names have at most 15 letters."""
    return f"node{pod.address.rpartition('.')[2]}"


def head_network(pod: Pod) -> str:
    """The site's switch, on which the head has its address."""
    return f"link add br0 type bridge\naddress add {pod.address}/24 dev br0\nlink set br0 up\n"


def cable_network(pod: Pod, pid: int) -> str:
    """A cable from the switch to a node."""
    name = cable(pod)
    return f"link add {name} type veth peer name eth0 netns {pid}\nlink set {name} master br0 up\n"


def node_network(pod: Pod, gateway: str) -> str:
    """The node's end of the cable."""
    route = f"route add default via {gateway} congctl {CONGESTION_CONTROL}\n"
    return f"address add {pod.address}/24 dev eth0\nlink set eth0 up\n{route}"


def wan_network(pod: Pod) -> str:
    """The head's way to the other sites, through the device that wanem made."""
    route = f"route add 10.71.0.0/16 dev wan0 src {pod.address} congctl {CONGESTION_CONTROL}\n"
    return f"link set wan0 up mtu 1500 txqueuelen 2000\n{route}"
