"""Commands at a site, through a program that stands in for ssh and runs them here."""

from __future__ import annotations

import stat
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from hetrl.errors import HetrlError, SiteUnreachableError
from launch import shell
from launch.shell import LOGIN_BASH, Shell, TimedOutError

FAKE_SSH = f"""#!{sys.executable} -IS
import os, subprocess, sys
words = sys.argv[1:]
if words[:2] == ["-O", "check"]:
    sys.exit(words[2] != "connected")
host = next(i for i, word in enumerate(words) if not word.startswith("-") and words[i - 1] not in ("-o", "-F"))
if words[host] == "dead":
    print("ssh: connect to host dead port 22: Connection refused", file=sys.stderr)
    sys.exit(255)
os.environ["SSH_OPTIONS"] = " ".join(words[:host])
sys.exit(subprocess.call(["sh", "-c", " ".join(words[host + 1:])]))
"""


@pytest.fixture(scope="module", autouse=True)
def fake_ssh(tmp_path_factory: pytest.TempPathFactory):
    directory = tmp_path_factory.mktemp("bin")
    ssh = directory / "ssh"
    ssh.write_text(FAKE_SSH)
    ssh.chmod(ssh.stat().st_mode | stat.S_IXUSR)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", str(directory), prepend=":")
        patch.setenv("XDG_RUNTIME_DIR", str(directory))
        yield


@pytest.mark.parametrize("host", ["local", "login"])
def test_output_exit_code_and_input(host):
    shell = Shell("alps", host)
    done = shell.run(["sh", "-c", "cat; echo oops >&2; exit 3"], timeout_seconds=20, stdin="hello")
    assert (done.code, done.stdout, done.stderr, done.telling) == (3, "hello", "oops\n", "oops")
    assert shell.calls == 1


@given(st.lists(st.text(st.characters(codec="ascii", exclude_characters="\0\r"), max_size=12), max_size=3))
def test_words_arrive_as_they_were_sent(words):
    argv = ["sh", "-c", 'for word; do printf "%s\\0" "$word" | od -An -v -tx1; done', "sh", *words]
    said = Shell("alps", "login").run(argv, timeout_seconds=20).stdout
    assert bytes.fromhex(said) == "".join(f"{word}\0" for word in words).encode()


@pytest.mark.parametrize("host", ["local", "login"])
def test_a_script_of_any_length_runs_in_a_login_shell_whose_start_up_does_not_see_it(tmp_path, monkeypatch, host):
    (tmp_path / ".bash_profile").write_text("cat >/dev/null; started=yes\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    script = f"# long.sh\n: {'x' * 200_000}\ncat\necho $started\nexit 3\n"
    done = Shell("alps", host).run(LOGIN_BASH, stdin=script, timeout_seconds=20)
    assert (done.code, done.stdout) == (3, "yes\n")
    with pytest.raises(HetrlError, match=r"alps: see: `bash -c '# long.sh'` failed: exit code 3 without a word"):
        Shell("alps", host).check(LOGIN_BASH, stdin="# long.sh\nexit 3", timeout_seconds=20, doing="see")


def test_environment_reaches_the_command():
    done = Shell("alps", "login").run(["sh", "-c", "echo $A"], timeout_seconds=20, environment={"A": "x y"})
    assert done.stdout == "x y\n"


@pytest.mark.parametrize(("host", "ours"), [("connected", False), ("login", True)])
def test_a_connection_that_the_user_keeps_is_taken(host: str, ours: bool):
    options = Shell("alps", host).run(["sh", "-c", "echo $SSH_OPTIONS"], timeout_seconds=20).stdout
    assert "BatchMode=yes" in options
    assert ("ControlPath" in options) == ours


def test_site_that_cannot_be_reached_is_named_with_what_ssh_said():
    with pytest.raises(SiteUnreachableError, match=r"alps: ssh dead failed: .*Connection refused; try `ssh dead true`"):
        Shell("alps", "dead").run(["true"], timeout_seconds=20)


def test_command_that_does_not_end_is_killed_and_named():
    with pytest.raises(TimedOutError, match=r"alps: `sleep 600` did not end within 0.2 s"):
        Shell("alps", "login").run(["sleep", "600"], timeout_seconds=0.2)


def test_failure_says_what_was_done_and_the_last_word():
    with pytest.raises(HetrlError, match=r"alps: list the partitions: `sh -c .*` failed: no such thing"):
        argv = ["sh", "-c", "echo no such thing >&2; false"]
        Shell("alps").check(argv, timeout_seconds=20, doing="list the partitions")


def test_program_that_is_not_there():
    with pytest.raises(HetrlError, match=r"alps: no-such-program is not installed here"):
        Shell("alps").run(["no-such-program"], timeout_seconds=20)


@pytest.mark.parametrize("host", ["local", "login"])
def test_copies_that_make_the_same_directories_at_the_same_time(tmp_path: Path, host: str):
    (tmp_path / "here").mkdir()
    (tmp_path / "here/file").write_text("x")
    targets = [tmp_path / "a b" / "run" / str(number) for number in range(8)]

    def copy(target: Path) -> None:
        Shell("alps", host).copy_to(tmp_path / "here", str(target), timeout_seconds=60)

    with ThreadPoolExecutor(len(targets)) as pool:
        list(pool.map(copy, targets))
    assert all((target / "file").read_text() == "x" for target in targets)


def test_a_site_without_room_is_not_taken_for_one_that_is_out_of_reach(tmp_path: Path, monkeypatch):
    (tmp_path / "rsync").write_text("#!/bin/sh\necho 'write failed: No space left on device (28)' >&2; exit 11\n")
    (tmp_path / "rsync").chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with pytest.raises(HetrlError, match="alps: cannot copy .* No space left on device; make room") as caught:
        Shell("alps").copy_to(tmp_path, str(tmp_path / "there"), timeout_seconds=20)
    assert caught.value.exit_code == 1


def test_a_scratch_that_is_somebody_else_s_is_not_out_of_reach(tmp_path: Path, monkeypatch):
    said = "mkdir: cannot create directory ‘/scratch/hetrl/a’: Permission denied"
    (tmp_path / "rsync").write_text(f"#!/bin/sh\necho '{said}' >&2; exit 12\n")
    (tmp_path / "rsync").chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with pytest.raises(HetrlError, match="alps: mkdir: .* Permission denied; name a `scratch` that is yours") as caught:
        Shell("alps").copy_to(tmp_path, str(tmp_path / "there"), timeout_seconds=20)
    assert caught.value.exit_code == 1


def test_directory_arrives_and_what_is_extra_goes(tmp_path: Path):
    (tmp_path / "here").mkdir()
    (tmp_path / "here/file").write_text("x")
    (tmp_path / "there").mkdir()
    (tmp_path / "there/old").write_text("y")
    target = str(tmp_path / "there")
    Shell("alps").copy_to(tmp_path / "here", target, timeout_seconds=20)
    assert {path.name for path in (tmp_path / "there").iterdir()} == {"file", "old"}
    Shell("alps").copy_to(tmp_path / "here", target, timeout_seconds=20, delete=True)
    assert {path.name for path in (tmp_path / "there").iterdir()} == {"file"}


@pytest.mark.parametrize("place", ["absent", "long"])
def test_sockets_go_elsewhere_where_their_place_is_gone_or_its_name_too_long(tmp_path: Path, monkeypatch, place: str):
    base = tmp_path / ("x" * 60)
    if place == "long":
        base.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(base))
    assert str(shell._control_directory()).startswith("/tmp/hetrl-ssh-")
