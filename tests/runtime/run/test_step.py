"""How a task of a Slurm step becomes a process: its row, its GPUs; and the addresses that a site shares."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from hetrl.errors import GangTimeoutError, UsageError
from hetrl.runtime.run.deaths import RELEASED, killed_at, released_at
from hetrl.runtime.run.step import JobProcesses, StepProcess, environment_of, process_of, read_processes
from hetrl.runtime.transport import rendezvous
from hetrl.runtime.transport.rendezvous import (
    meet,
    node_address,
    publish_endpoint,
    read_endpoint,
    wait_for_endpoint,
)
from tests.launch.launch_cases import until

ROOT = Path(__file__).parents[3]
JOB = JobProcesses(
    {
        "train": tuple(StepProcess(f"train-{rank}", ("true",), {}) for rank in range(3)),
        "0": (StepProcess("a", (), {}),),
    },
)


# --- processes --------------------------------------------------------------------------------------------------------


def test_each_task_of_a_step_takes_its_row():
    for number in range(3):
        assert process_of(JOB, "train", {"SLURM_PROCID": str(number), "SLURM_NTASKS": "3"}).name == f"train-{number}"
    assert process_of(JOB, "0", {}).name == "a"


def test_a_step_with_another_number_of_tasks_is_refused():
    with pytest.raises(UsageError, match="step train has 3 processes, and srun started 2 tasks"):
        process_of(JOB, "train", {"SLURM_PROCID": "1", "SLURM_NTASKS": "2"})


def test_an_unknown_step_is_refused_with_those_there_are():
    with pytest.raises(UsageError, match='no step "trian".*train, 0'):
        process_of(JOB, "trian", {})


@pytest.mark.parametrize("text", [None, "{", "[]", '{"gang_timeout_seconds": 1}', '{"steps": {"a": [{"name": 1}]}}'])
def test_a_file_that_has_no_rows_is_named(tmp_path, text):
    path = tmp_path / "gang.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UsageError, match=r"gang\.json: (cannot read|not) the rows of (this|a) job"):
        read_processes(path)


# --- GPUs -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("granted", "row", "visible"),
    [
        ("0,1,2,3", "2,3", "2,3"),
        ("5,6", "0,1", "5,6"),
        ("5,6", "1,0", "6,5"),
        ("GPU-8932f937,GPU-1", "1", "GPU-1"),
        ("MIG-c7384736-a75d,MIG-a28ad590-3fda", "1", "MIG-a28ad590-3fda"),
        ("MIG-GPU-8932f937/7/0,MIG-GPU-8932f937/8/0", "0", "MIG-GPU-8932f937/7/0"),  # as drivers before 470 name them
    ],
)
def test_gpus_are_those_that_slurm_granted(granted, row, visible):
    found = environment_of(
        StepProcess("a", (), {"CUDA_VISIBLE_DEVICES": row}), {"CUDA_VISIBLE_DEVICES": granted, "HOME": "/h"}
    )
    assert found == {"CUDA_VISIBLE_DEVICES": visible, "HOME": "/h"}


@pytest.mark.parametrize("inherited", [{}, {"CUDA_VISIBLE_DEVICES": ""}, {"CUDA_VISIBLE_DEVICES": "4,5"}])
def test_too_few_granted_gpus_are_said(inherited):
    with pytest.raises(UsageError, match=r"actor_generation-1 needs GPU 2 of its node.*granted [02] "):
        environment_of(StepProcess("actor_generation-1", (), {"CUDA_VISIBLE_DEVICES": "1,2"}), inherited)


def test_a_process_without_gpus_sees_none_of_those_that_slurm_granted():
    process = StepProcess("controller", (), {"HETRL_RUN": "r", "CUDA_VISIBLE_DEVICES": ""})
    assert environment_of(process, {"CUDA_VISIBLE_DEVICES": "0"}) == {"CUDA_VISIBLE_DEVICES": "", "HETRL_RUN": "r"}


# --- addresses --------------------------------------------------------------------------------------------------------


def test_processes_meet_where_the_first_one_says(tmp_path, monkeypatch):
    monkeypatch.setattr(rendezvous, "POLL_SECONDS", 0.01)
    path, found = tmp_path / "rank-0.endpoint", []

    def come(serves: bool) -> tuple[str, int]:
        return meet(path, serves=serves, timeout_seconds=20, whose="rank 0")

    late = threading.Thread(target=lambda: found.append(come(serves=False)))
    late.start()
    first = come(serves=True)
    late.join(20)
    assert found == [first]
    with socket.socket() as probe:
        probe.bind(first)  # an address of this node, and free


def test_a_first_one_that_does_not_come_is_named(tmp_path):
    with pytest.raises(GangTimeoutError, match=r"waited 0 s for rank-0.endpoint: rank 0 did not start"):
        meet(tmp_path / "rank-0.endpoint", serves=False, timeout_seconds=0, whose="rank 0")


def test_who_serves_again_is_found_where_it_was(tmp_path):
    path = tmp_path / "gateway.endpoint"
    endpoint = publish_endpoint(path)
    assert publish_endpoint(path) == endpoint == read_endpoint(path)
    path.write_text("tcp://203.0.113.9:4000\n")  # another node had it
    assert publish_endpoint(path) != "tcp://203.0.113.9:4000"
    assert publish_endpoint(path, port=7001).endswith(":7001")
    assert wait_for_endpoint(path, 0, "the gateway").endswith(":7001")
    assert read_endpoint(tmp_path / "x.endpoint") is None


def test_an_interface_gives_its_address_and_others_are_listed():
    assert node_address("lo") == "127.0.0.1"
    with pytest.raises(UsageError, match="interface ib9 has no IPv4 address.* one of .*lo"):
        node_address("ib9")


def test_a_name_on_loopback_is_no_address(monkeypatch):
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "127.0.1.1")
    own = {one.address for addresses in psutil.net_if_addrs().values() for one in addresses}
    try:
        assert node_address() in own
    except UsageError as error:
        assert "set `interface`" in str(error)


# --- the whole program ------------------------------------------------------------------------------------------------


def run_step(directory: Path, step: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hetrl.runtime.run.step", "scripts/gang.json", step]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "CUDA_"))}
    return subprocess.run(
        command,
        cwd=directory,
        env={**inherited, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def site_directory(directory: Path, code: str, **more: str) -> Path:
    rows = [
        {"name": f"train-{number}", "argv": ["python", "-c", code], "environment": {"HETRL_RUN": str(number), **more}}
        for number in range(2)
    ]
    for folder in ("scripts", "logs"):
        (directory / folder).mkdir(parents=True)
    document = {"steps": {"train": rows}}
    (directory / "scripts" / "gang.json").write_text(json.dumps(document))
    return directory


def test_a_task_becomes_its_process_with_its_log_and_exit_code(tmp_path):
    code = "import os, sys; print(os.environ['HETRL_RUN']); sys.exit(5)"
    directory = site_directory(tmp_path, code)
    for number in range(2):
        done = run_step(directory, "train", SLURM_PROCID=str(number), SLURM_NTASKS="2")
        assert (done.returncode, done.stdout, done.stderr) == (5, "", "")
        assert (directory / "logs" / f"train-{number}.log").read_text() == f"{number}\n"


@pytest.mark.parametrize(("end", "code"), [("sys.exit(5)", 5), ("os.kill(os.getpid(), 9)", 137), ("sys.exit(0)", 0)])
def test_the_first_task_that_fails_is_noted(tmp_path, end, code):
    directory = site_directory(tmp_path, f"import os, sys; {end}")
    for number in (1, 0):
        task = {"SLURM_PROCID": str(number), "SLURM_NTASKS": "2"}
        assert run_step(directory, "train", **task, HETRL_FAILURE="logs/failure").returncode == code
    failure = directory / "logs" / "failure"
    assert (failure.read_text() if failure.exists() else "") == (f"{code} train-1\n" if code else "")


def test_a_process_that_a_signal_ended_is_known_to_the_controller_until_it_starts_again(tmp_path):
    code = "import os; number = int(os.environ['HETRL_RUN']); number or os.kill(os.getpid(), 9)"
    directory = site_directory(tmp_path, code)
    rows = directory / "scripts" / "gang.json"
    rows.write_text(rows.read_text().replace("train-", "actor_training-"))
    for number, ended in ((0, 137), (1, 0)):
        assert run_step(directory, "train", SLURM_PROCID=str(number), SLURM_NTASKS="2").returncode == ended
    assert killed_at(directory, "alpha") == {"alpha/actor_training.rank/0": "SIGKILL"}
    (directory / f"{RELEASED}beta").touch()
    assert released_at(directory) == {"beta"}
    for name in ("actor_generation-3", "gateway", "no-task-4"):
        (directory / "logs" / f"{name}.killed").write_text("SIGSEGV")
    (directory / "logs" / "actor_training-7.killed").symlink_to("gone")  # started again between two looks
    found = {"alpha/actor_training.rank/0": "SIGKILL", "alpha/actor_generation/3": "SIGSEGV"}
    assert killed_at(directory, "alpha") == found
    rows.write_text(rows.read_text().replace("number or", "None and"))
    assert run_step(directory, "train", SLURM_PROCID="0", SLURM_NTASKS="2").returncode == 0
    assert killed_at(directory, "alpha") == {"alpha/actor_generation/3": "SIGSEGV"}


@pytest.mark.parametrize(
    ("end", "code", "starts"),
    [("os.kill(os.getpid(), 9)", 137, 4), ("os.kill(os.getpid(), 15)", 143, 1), ("sys.exit(1)", 1, 1)],
)
def test_a_rollout_of_an_array_that_was_killed_is_started_again(tmp_path, end, code, starts):
    directory = site_directory(tmp_path, f"import os, sys; print('here', flush=True); {end}")
    rows = directory / "scripts" / "gang.json"
    rows.write_text(rows.read_text().replace('"train"', '"0"').replace("train-", "actor_generation-"))
    done = run_step(directory, "0", SLURM_PROCID="1", SLURM_NTASKS="2")
    assert done.returncode == code
    log = (directory / "logs" / "actor_generation-1.log").read_text()
    assert log.count("here") == starts == log.count("is started again") + 1
    killed = {"alpha/actor_generation/1": {137: "SIGKILL", 143: "SIGTERM"}[code]} if code > 128 else {}
    assert killed_at(directory, "alpha") == killed


@pytest.mark.parametrize(("send", "number", "code"), [(os.killpg, signal.SIGTERM, 143), (os.kill, signal.SIGKILL, -9)])
def test_a_signal_for_the_group_ends_the_process_and_one_for_its_parent_too(tmp_path, send, number, code):
    directory = site_directory(tmp_path, "import os, time; print(os.getppid(), flush=True); time.sleep(99)")
    command = [sys.executable, "-m", "hetrl.runtime.run.step", "scripts/gang.json", "train"]
    task = {"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "PYTHONPATH": str(ROOT)}
    log = directory / "logs" / "train-0.log"
    with subprocess.Popen(command, cwd=directory, env={**os.environ, **task}, start_new_session=True) as step:
        until(lambda: log.exists() and log.read_text(), "its parent's number")
        assert int(log.read_text()) == step.pid
        (child,) = psutil.Process(step.pid).children()
        send(step.pid, number)
        assert step.wait(20) == code
    child.wait(20)


def test_what_keeps_a_task_from_starting_is_in_its_log(tmp_path):
    directory = site_directory(tmp_path, "pass", CUDA_VISIBLE_DEVICES="3")
    assert run_step(directory, "train", SLURM_PROCID="1", SLURM_NTASKS="2").returncode == 2
    assert "error: train-1 needs GPU 3 of its node" in (directory / "logs" / "train-1.log").read_text()
    done = run_step(directory, "train", SLURM_PROCID="0", SLURM_NTASKS="1")
    assert done.returncode == 2
    assert "error: step train has 2 processes" in done.stderr
