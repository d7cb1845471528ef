"""The machines of the lab, and what is left of them afterwards."""

from __future__ import annotations

import multiprocessing
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lab.available import skip_unless_available
from lab.lab import ROOT, Lab
from lab.probes import ping
from lab.processes import LabError, start_of, wait_until
from lab.shape import JOB_USER_ID, Site

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(300)]


def test_the_job_user_runs_the_projects_python(lab: Lab) -> None:
    program = "import hetrl, os, numpy; print(os.getuid(), os.path.dirname(hetrl.__file__))"
    done = lab.run("beta-2", [sys.executable, "-c", program], environment={"PYTHONDONTWRITEBYTECODE": "1"})
    assert done.stdout.split() == [str(JOB_USER_ID), str(ROOT / "hetrl")]


def test_a_site_has_one_home_and_nodes_have_their_own_tmp(lab: Lab) -> None:
    lab.run("alpha-1", ["sh", "-c", "echo here >~/note; echo here >/tmp/note"])
    assert lab.run("alpha", ["cat", "note"]).stdout == "here\n"
    assert (lab.home("alpha") / "note").read_text() == "here\n"
    assert not (lab.home("beta") / "note").exists()
    assert "note" not in lab.run("alpha-2", ["ls", "/tmp"]).stdout.split()
    assert not Path("/tmp/note").exists()


def test_a_command_gets_a_clean_login(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_OF_THE_CALLER", "1")
    lines = lab.run("gamma-1", ["env"], environment={"COLOUR": "blue"}).stdout.splitlines()
    assert {"HOME=/home/labuser", "USER=labuser", "COLOUR=blue"} <= set(lines)
    assert lab.run("gamma-1", ["pwd"]).stdout == "/home/labuser\n"
    assert not any("SECRET" in line for line in lines)


def test_a_failed_command_says_why(lab: Lab) -> None:
    with pytest.raises(LabError, match=r"return code 3\nout\nbad"):
        lab.run("alpha", ["sh", "-c", "echo out; echo bad >&2; exit 3"])
    with pytest.raises(LabError, match="no pod 'delta' in the lab; there are alpha, alpha-1"):
        lab.run("delta", ["true"])


def test_a_command_that_takes_too_long_is_killed_with_its_children(lab: Lab) -> None:
    with pytest.raises(LabError, match=r"sleep 4321.: not done after 3 s\nbegun"):
        lab.run("alpha-1", ["sh", "-c", "echo begun; sleep 4321 & sleep 4321"], timeout_seconds=3)
    wait_until(lambda: "4321" not in lab.run("alpha-1", ["ps", "ax"]).stdout, 10, lambda: "sleep lives on")


def test_a_killed_node_is_silent_and_comes_back(lab: Lab) -> None:
    sleeper = lab.popen("gamma-1", ["sleep", "4321"])
    lab.kill_node("gamma-1")
    assert sleeper.wait(10) != 0
    assert ping(lab, "gamma", "gamma-1", "-c2", "-i0.1")[0] == 0
    with pytest.raises(LabError, match="gamma-1 is not up"):
        lab.run("gamma-1", ["true"])
    lab.start_node("gamma-1")
    assert lab.run("gamma-1", ["ssh", "alpha", "hostname"]).stdout == "alpha\n"


def test_labs_do_not_hear_each_other(lab: Lab) -> None:
    with Lab({"beta": Site(1), "alpha": Site(1)}) as other:
        assert other.address("beta") == lab.address("alpha")
        assert other.run("alpha-1", ["ssh", "beta", "hostname"]).stdout == "beta\n"
        assert lab.run("beta-1", ["ssh", "alpha", "hostname"]).stdout == "alpha\n"
    assert lab.run("beta-1", ["ssh", "alpha", "hostname"]).stdout == "alpha\n"


# --- what is left -----------------------------------------------------------------------------------------------------


def processes_of(lab: Lab) -> dict[int, str | None]:
    """Return every process in the process namespaces of a lab, with its start."""
    inside = {Path(f"/proc/{lab.pid(name)}/ns/pid").readlink() for name in lab.pods}
    found = {}
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            if (directory / "ns/pid").readlink() in inside:
                found[int(directory.name)] = start_of(int(directory.name))
        except OSError:
            continue
    return found


def assert_gone(processes: dict[int, str | None], directory: Path) -> None:
    def gone() -> bool:
        return not directory.exists() and not any(start_of(pid) == start for pid, start in processes.items())

    wait_until(gone, 30, lambda: f"of {directory} there is still: {[pid for pid in processes if start_of(pid)]}")
    assert str(directory) not in Path("/proc/self/mountinfo").read_text()
    assert not {"wan0", "br0", "node11"} & {path.name for path in Path("/sys/class/net").iterdir()}


def test_nothing_is_left_after_the_block() -> None:
    skip_unless_available()
    with Lab({"alpha": Site(1)}, slurm=True) as lab:
        lab.run("alpha-1", ["sh", "-c", "setsid sleep 4321 >/dev/null 2>&1 </dev/null &"])
        processes = processes_of(lab)
        assert len(processes) > 8
    assert_gone(processes, lab.directory)


def test_nothing_is_left_when_a_forked_process_lives_on() -> None:
    skip_unless_available()
    with Lab({"alpha": Site(1)}) as lab:
        processes = processes_of(lab)
        fork = multiprocessing.get_context("fork").Process(target=signal.pause)  # holds what this process has open
        fork.start()
    assert_gone(processes, lab.directory)
    assert fork.is_alive()
    fork.kill()
    fork.join()


def test_nothing_is_left_when_the_block_fails() -> None:
    skip_unless_available()
    with pytest.raises(ZeroDivisionError), Lab({"alpha": Site(1)}) as lab:
        processes = processes_of(lab)
        raise ZeroDivisionError
    assert_gone(processes, lab.directory)


def test_nothing_is_left_when_the_keeper_is_killed() -> None:
    skip_unless_available()
    program = "from lab.lab import *\nwith Lab(slurm=True) as lab: print(lab.directory, flush=True); input()"
    keeper = subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with keeper:
        assert keeper.stdout
        lab = Lab.attach(Path(keeper.stdout.readline().strip()))
        processes = processes_of(lab)
        assert len(processes) > 20
        keeper.kill()
    assert_gone(processes, lab.directory)
