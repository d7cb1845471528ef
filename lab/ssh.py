"""ssh between the sites: one key of the job user, accepted by all heads."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from lab.processes import call
from lab.shape import JOB_USER, JOB_USER_ID

# PAM is off for it would look for sessions that no pod has.
SSHD_CONFIG = """\
HostKey {directory}/ssh/host
PidFile /run/sshd.pid
UsePAM no
UseDNS no
PasswordAuthentication no
MaxStartups 100
Subsystem sftp internal-sftp
"""


def configure(directory: Path, sites: Iterable[str]) -> None:
    """Write the keys, the server's configuration, and the job user's ~/.ssh of every site."""
    keys = directory / "ssh"
    keys.mkdir(mode=0o700)
    for name in ("host", "user"):
        call(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "lab", "-f", str(keys / name)], timeout_seconds=30)
    (keys / "sshd_config").write_text(SSHD_CONFIG.format(directory=directory))
    known_hosts = f"{','.join(sites)} {(keys / 'host.pub').read_text()}"
    for site in sites:
        own = directory / "home" / site / JOB_USER / ".ssh"
        own.mkdir(mode=0o700, parents=True)
        shutil.copy(keys / "user", own / "id_ed25519")
        shutil.copy(keys / "user.pub", own / "authorized_keys")
        (own / "known_hosts").write_text(known_hosts)
        for path in (own.parent, own, *own.iterdir()):
            os.chown(path, JOB_USER_ID, JOB_USER_ID)


def server(directory: Path) -> list[str]:
    """Return the command that starts sshd in a head."""
    return ["/usr/sbin/sshd", "-f", f"{directory}/ssh/sshd_config", "-E", f"{directory}/log/sshd.log"]
