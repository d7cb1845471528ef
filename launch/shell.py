"""Run commands at a site: on this machine, or on the site's login node through the user's own OpenSSH.

Every command of the launcher goes through `Shell.run(argv, timeout)`. ssh takes one connection per site and keeps it
for a while (ControlMaster), so that a second factor is asked for at most once, and beforehand: BatchMode never asks.
Where the user's own ssh keeps a connection to the host, that one is taken.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hetrl.errors import HetrlError, SiteUnreachableError

LOCAL = "local"
CONNECT_SECONDS = 10
PERSIST_SECONDS = 600
FULL = re.compile(r"No space left on device|Disk quota exceeded")
REFUSED = re.compile(r"mkdir: .*: (Permission denied|Read-only file system)")
SSH_FAILED = 255  # ssh's own exit code, EXIT STATUS of ssh(1)

# They run the script that they get as input: as a word it may be too long (128 KiB, execve(2)), and the user's own
# shell, be it tcsh, would read it first. In a login shell, for a site's start-up is where the programs of Slurm come
# into the PATH, by modules or else; it does not see the input.
_FROM_INPUT = """exec bash {} 'eval "$(cat <&3)" 3<&-' 3<&0 </dev/null"""
BASH, LOGIN_BASH = (("sh", "-c", _FROM_INPUT.format(option)) for option in ("-c", "-lc"))


class TimedOutError(SiteUnreachableError):
    """A command did not end in time; what it asked for may have happened all the same."""


@dataclass(frozen=True)
class Done:
    """A command that ended."""

    argv: tuple[str, ...]
    code: int
    stdout: str
    stderr: str

    @property
    def telling(self) -> str:
        """Return the last line that says why it failed."""
        return final_line(self.stderr or self.stdout) or f"exit code {self.code} without a word"


@dataclass
class Shell:
    """One site's command line; `host` is `local` or a host of the user's OpenSSH configuration.

    `calls` counts the commands that crossed to the site.
    """

    site: str
    host: str = LOCAL
    calls: int = field(default=0, compare=False)

    def run(
        self,
        argv: Sequence[str],
        *,
        timeout_seconds: float,
        stdin: str | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> Done:
        """Run a command and return what came of it, whatever its exit code; `stdin` is its input, or its script.

        Raises SiteUnreachableError where ssh cannot get there, TimedOutError after `timeout_seconds`, HetrlError
        where the program is not there.
        """
        self.calls += 1
        command = ["env", *(f"{key}={value}" for key, value in environment.items()), *argv] if environment else argv
        code, stdout, stderr = self._spawn(self._through(command), argv, timeout_seconds, stdin)
        if self.host != LOCAL and code == SSH_FAILED:
            said = Done(tuple(argv), code, "", stderr).telling
            raise SiteUnreachableError(
                f"{self.site}: ssh {self.host} failed: {said}; try `ssh {self.host} true` by hand, and log in once "
                "beforehand where the site asks for a second factor"
            )
        return Done(tuple(argv), code, stdout, stderr)

    def check(self, argv: Sequence[str], *, timeout_seconds: float, doing: str, stdin: str | None = None) -> str:
        """Run a command and return its output; raises HetrlError, with `doing` and its last word, where it fails."""
        done = self.run(argv, timeout_seconds=timeout_seconds, stdin=stdin)
        if done.code:
            raise HetrlError(f"{self.site}: {doing}: `{_shown(argv, stdin)}` failed: {done.telling}")
        return done.stdout

    def copy_to(
        self, source: Path, target: str, *, timeout_seconds: float, delete: bool = False, exclude: Sequence[str] = ()
    ) -> None:
        """Make the directory `target` at the site the same as `source` here (rsync); `delete` removes what is extra.

        `exclude` are patterns of rsync(1) for what is left alone. Several copies may make the directories above
        `target` at the same time.
        """
        self.calls += 1
        remote = target if self.host == LOCAL else f"{self.host}:{target}"
        options = ["--archive", *(["--delete"] if delete else [])]
        options += [f"--exclude={pattern}" for pattern in exclude]
        make = f"mkdir -p -- {shlex.quote(target)} && "  # rsync's --mkpath fails where another makes one first
        if self.host == LOCAL:
            argv = ["sh", "-c", f'{make}exec "$@"', "sh", "rsync", *options, f"{source}/", f"{remote}/"]
        else:
            transport = ["--rsh", shlex.join(self._ssh()), f"--rsync-path={make}rsync"]
            argv = ["rsync", *options, *transport, f"{source}/", f"{remote}/"]
        code, stdout, stderr = self._spawn(argv, argv, timeout_seconds, None)
        if code and (full := FULL.search(stderr)):
            raise HetrlError(f"{self.site}: cannot copy {source} to {remote}: {full[0]}; make room there")
        if code and (refused := REFUSED.search(stderr)):
            raise HetrlError(f"{self.site}: {refused[0]}; name a `scratch` that is yours in the site's file")
        if code:
            said = Done(tuple(argv), code, stdout, stderr).telling
            raise SiteUnreachableError(f"{self.site}: cannot copy {source} to {remote}: {said}")

    def copy_from(self, source: str, target: Path, *, timeout_seconds: float, exclude: Sequence[str] = ()) -> None:
        """Make the directory `target` here the same as `source` at the site (rsync), but for patterns of `exclude`."""
        self.calls += 1
        remote = source if self.host == LOCAL else f"{self.host}:{source}"
        transport = [] if self.host == LOCAL else ["--rsh", shlex.join(self._ssh())]
        patterns = [f"--exclude={pattern}" for pattern in exclude]
        argv = ["rsync", "--archive", "--delete", "--delete-excluded", *patterns, *transport]
        code, stdout, stderr = self._spawn([*argv, f"{remote}/", f"{target}/"], argv, timeout_seconds, None)
        if code:
            said = Done(tuple(argv), code, stdout, stderr).telling
            raise HetrlError(f"{self.site}: cannot copy {remote} to {target}: {said}")

    def _ssh(self) -> list[str]:
        return [
            "ssh",
            *("-o", "BatchMode=yes"),
            *("-o", f"ConnectTimeout={CONNECT_SECONDS}"),
            # A connection that died is given up after 30 s; the one that is kept would hang every later command.
            *("-o", "ServerAliveInterval=10", "-o", "ServerAliveCountMax=3"),
            *([] if self._user_is_connected() else _own_connection()),
        ]

    def _user_is_connected(self) -> bool:
        """Return whether the user's own ssh keeps a connection to the host, as its configuration says."""
        try:
            asked = subprocess.run(
                ["ssh", "-O", "check", self.host],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=CONNECT_SECONDS,
                check=False,
            )
        except (FileNotFoundError, subprocess.TimeoutExpired):
            return False
        return asked.returncode == 0

    def _through(self, command: Sequence[str]) -> list[str]:
        """Return the words to execute here; the remote shell splits its one word again, so that one is quoted."""
        return list(command) if self.host == LOCAL else [*self._ssh(), self.host, shlex.join(command)]

    def _spawn(
        self, words: Sequence[str], argv: Sequence[str], timeout_seconds: float, stdin: str | None
    ) -> tuple[int, str, str]:
        try:
            process = subprocess.Popen(
                words,
                # Never the terminal: ssh would read away what is typed for the launcher.
                stdin=subprocess.PIPE if stdin is not None else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                start_new_session=True,  # a group to end as a whole, which Ctrl-C at the terminal does not reach
            )
        except FileNotFoundError:
            raise HetrlError(f"{self.site}: {words[0]} is not installed here; install it or load its module") from None
        try:
            stdout, stderr = process.communicate(stdin, timeout=timeout_seconds)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            raise TimedOutError(
                f"{self.site}: `{_shown(argv, stdin)}` did not end within {timeout_seconds:g} s"
            ) from None
        return process.returncode, stdout, stderr


def _own_connection() -> list[str]:
    """Return the options by which ssh makes a connection of ours, and keeps it."""
    return [
        *("-o", "ControlMaster=auto", "-o", f"ControlPersist={PERSIST_SECONDS}"),
        *("-o", f"ControlPath={_control_directory() / '%C'}"),
    ]


def final_line(text: str) -> str:
    """Return the last line that says something, nothing where none does."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


def _shown(argv: Sequence[str], stdin: str | None) -> str:
    """Return a command for a message: of a script its first line, which says what it is."""
    words = ("bash", "-c", stdin) if argv in (BASH, LOGIN_BASH) and stdin is not None else argv[:4]
    return shlex.join(word.partition("\n")[0] for word in words)


_LONGEST_BASE = 32  # bytes: behind it come our directory, 40 bytes for the connection, and 17 that ssh adds


def _control_directory() -> Path:
    """Return a private directory with a short name: a unix socket's path may have 107 bytes."""
    base = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    if not Path(base).is_dir() or len(os.fsencode(base)) > _LONGEST_BASE:  # systemd removes it with the last login
        base = "/tmp"
    directory = Path(base) / f"hetrl-ssh-{os.getuid()}"
    directory.mkdir(mode=0o700, exist_ok=True)
    if directory.stat().st_uid != os.getuid() or directory.stat().st_mode & 0o077:
        raise HetrlError(f"{directory}: is open to others; remove it, ssh's control sockets go there")
    return directory
