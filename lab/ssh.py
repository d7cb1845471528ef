"""ssh between the sites: one key of the job user, accepted by all heads; some want a second one, with a passphrase."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from lab.processes import call
from lab.shape import JOB_USER, JOB_USER_ID, Site

if TYPE_CHECKING:
    from lab.lab import Lab

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
# Whoever comes from a head shows two keys, one after the other (sshd_config(5), AuthenticationMethods); a job, coming
# from a node, shows one: as sites let a registered key of a project in without a person.
SECOND_FACTOR = """\
Match Address 10.71.?.1
    AuthenticationMethods publickey,publickey
"""
# What a user writes for such a host: BatchMode asks for no passphrase, so that only a connection which stands will do.
CLIENT = """\
Host {sites}
    IdentityFile ~/.ssh/id_ed25519
    IdentityFile ~/.ssh/second_factor
    ControlPath ~/.ssh/control-%C
"""
PASSPHRASE = "six digits"
# ssh asks this program, as nobody types here; the connection stays until the lab is down.
LOG_IN = """\
ask=$(mktemp)
printf '#!/bin/sh\\necho "%s"\\n' "$2" >"$ask" && chmod 700 "$ask"
SSH_ASKPASS=$ask SSH_ASKPASS_REQUIRE=force ssh -fNM "$1" </dev/null >/dev/null 2>"$ask.said"
code=$?
cat "$ask.said" >&2
rm "$ask" "$ask.said"
exit "$code"
"""


def configure(directory: Path, sites: Mapping[str, Site]) -> None:
    """Write the keys, the servers' configurations, and the job user's ~/.ssh of every site."""
    keys = directory / "ssh"
    keys.mkdir(mode=0o700)
    for name, passphrase in (("host", ""), ("user", ""), ("second_factor", PASSPHRASE)):
        words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", passphrase, "-C", name, "-f", str(keys / name)]
        call(words, timeout_seconds=30)
    known_hosts = f"{','.join(sites)} {(keys / 'host.pub').read_text()}"
    asking = [name for name, site in sites.items() if site.second_factor]
    for name, described in sites.items():
        more = SECOND_FACTOR if described.second_factor else ""
        (keys / f"sshd_config.{name}").write_text(SSHD_CONFIG.format(directory=directory) + more)
        own = directory / "home" / name / JOB_USER / ".ssh"
        own.mkdir(mode=0o700, parents=True)
        shutil.copy(keys / "user", own / "id_ed25519")
        accepted = [(keys / "user.pub").read_text()]
        if asking:
            shutil.copy(keys / "second_factor", own / "second_factor")
            accepted.append((keys / "second_factor.pub").read_text())
            (own / "config").write_text(CLIENT.format(sites=" ".join(asking)))
        (own / "authorized_keys").write_text("".join(accepted))
        (own / "known_hosts").write_text(known_hosts)
        for path in (own.parent, own, *own.iterdir()):
            os.chown(path, JOB_USER_ID, JOB_USER_ID)
            if path.is_file():
                path.chmod(0o600)


def server(directory: Path, site: str) -> list[str]:
    """Return the command that starts sshd in a head."""
    return ["/usr/sbin/sshd", "-f", f"{directory}/ssh/sshd_config.{site}", "-E", f"{directory}/log/sshd.log"]


def log_in(lab: Lab, site: str, to: str) -> None:
    """Make the connection from a head to another one that a user would, passphrase and all; others take it over."""
    lab.run(site, ["sh", "-c", LOG_IN, "sh", to, PASSPHRASE])
