"""Temporary files of processes that are killed go: with who started them, with the next start, never while in use."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from hetrl.runtime import temporary
from hetrl.runtime.temporary import PREFIX, hold, make_private, node_place, private_directory, remove_unheld
from hetrl.runtime.weights.node_directory import node_directory
from tests.launch.launch_cases import until
from tests.runtime.run.test_step import ROOT, run_step, site_directory

LEAVES = "import os, tempfile; tempfile.mkdtemp(prefix='vllm-'); os.kill(os.getpid(), 9)"
DEAF = "import signal; signal.signal(15, signal.SIG_IGN)"  # it does not hear that its wrapper is gone
WAITS = f"{DEAF}; import os, tempfile, time; print(tempfile.mkdtemp(), os.getpid(), flush=True); time.sleep(99)"
HOLDS_WEIGHTS = """
import sys, time
from pathlib import Path
from hetrl.runtime.weights.node_directory import node_directory
with node_directory("hetrl-tmp-x", 0, int(sys.argv[1]), Path(".")) as (directory, share):
    share.leads(), (directory / "version-1.safetensors").touch()
    print(directory, flush=True)
    time.sleep(99)
"""


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A temporary directory of the node with a path short enough for sockets, and no other one."""
    path = Path(tempfile.mkdtemp(prefix="t-", dir="/tmp"))
    monkeypatch.setenv("TMPDIR", str(path))
    monkeypatch.setattr(tempfile, "tempdir", str(path))
    monkeypatch.setattr(temporary, "MEMORY", path)
    yield path
    shutil.rmtree(path)


def left(place: Path) -> list[str]:
    return [path.name for path in place.iterdir()]


def test_a_process_that_is_killed_leaves_nothing_behind(tmp_path: Path, place: Path) -> None:
    directory = site_directory(tmp_path, LEAVES)
    assert run_step(directory, "train", SLURM_PROCID="0", SLURM_NTASKS="2").returncode == 137
    assert left(place) == []


def test_what_was_killed_with_its_wrapper_is_removed_by_the_next_start_and_not_before(
    tmp_path: Path, place: Path
) -> None:
    """Both are killed at once, as Slurm does; a process that lives on without its wrapper keeps its files."""
    directory, log = site_directory(tmp_path / "a", WAITS), tmp_path / "a" / "logs" / "train-0.log"
    command = [sys.executable, "-m", "hetrl.runtime.run.step", "scripts/gang.json", "train"]
    task = {"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, cwd=directory, env={**os.environ, **task}) as step:
        until(lambda: log.exists() and log.read_text().endswith("\n"), "the process is up")
        made, number = log.read_text().split()
        process = psutil.Process(int(number))
        step.kill()
        step.wait()
    other = site_directory(tmp_path / "b", "pass")
    assert run_step(other, "train", SLURM_PROCID="0", SLURM_NTASKS="2").returncode == 0
    assert Path(made).is_dir()
    process.kill()
    until(lambda: not process.is_running(), "the process is gone")
    assert Path(made).is_dir()
    assert run_step(other, "train", SLURM_PROCID="0", SLURM_NTASKS="2").returncode == 0
    assert left(place) == []


def test_the_weights_of_a_node_stay_until_its_last_replica_is_killed(tmp_path: Path, place: Path) -> None:
    command = [sys.executable, "-c", HOLDS_WEIGHTS]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    replicas = [
        subprocess.Popen([*command, str(number)], env=environment, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
        for number in range(2)
    ]
    found = [Path(replica.stdout.readline().strip()) for replica in replicas if replica.stdout]
    try:
        assert [path.parent for path in found] == [place / f"{PREFIX}x"] * 2
        for replica, expected in zip(replicas, ([f"{PREFIX}x"], []), strict=True):
            replica.send_signal(signal.SIGKILL)
            replica.wait()
            remove_unheld()
            assert left(place) == expected
    finally:
        for replica in replicas:
            replica.kill()
            replica.communicate()


def test_the_directory_of_a_process_is_its_own_and_its_name_short(place: Path) -> None:
    with private_directory() as one, private_directory() as other:
        assert one.path != other.path
        assert one.path.stat().st_mode & 0o777 == 0o700
        assert len(str(one.path)) < temporary.MOST_BYTES
        remove_unheld()
        assert sorted(left(place)) == sorted([one.path.name, other.path.name])
    assert left(place) == []


def test_where_the_path_is_too_long_for_sockets_it_is_in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("long" * 20)))
    with private_directory() as held:
        assert held.path.parent == Path("/tmp")


def test_processes_with_directories_of_their_own_share_their_node_s(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = make_private()
    monkeypatch.setattr(tempfile, "tempdir", str(held.path))
    assert node_place() == place
    with node_directory(f"{PREFIX}x", 0, 0, place) as (directory, _):
        assert directory.parent.parent == place
    held.leave()
    remove_unheld()
    assert left(place) == []


def test_what_is_held_stays_where_a_cleaner_took_what_was_old_in_it(place: Path) -> None:
    held = make_private()
    (held.path / "old").touch()
    for old in held.path.iterdir():
        old.unlink()
    remove_unheld()
    assert held.path.is_dir()
    held.release()
    assert left(place) == []


def test_what_others_made_is_left_alone(tmp_path: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (place / "hetrl-other").mkdir()
    (tmp_path / "precious").mkdir()
    (place / f"{PREFIX}link").symlink_to(tmp_path / "precious")
    (place / f"{PREFIX}theirs").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(temporary.os, "getuid", lambda: place.stat().st_uid + 1)
        remove_unheld()
    assert sorted(left(place)) == ["hetrl-other", f"{PREFIX}link", f"{PREFIX}theirs"]
    remove_unheld()
    assert sorted(left(place)) == ["hetrl-other", f"{PREFIX}link"]
    assert left(tmp_path) == ["precious"]


def test_who_comes_while_a_directory_is_removed_does_not_hold_it(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = place / f"{PREFIX}x"
    directory.mkdir()
    flock = temporary.fcntl.flock

    def removed_before(descriptor: int, how: int) -> None:
        shutil.rmtree(directory)
        flock(descriptor, how)

    monkeypatch.setattr(temporary.fcntl, "flock", removed_before)
    with pytest.raises(FileNotFoundError):
        hold(directory)
