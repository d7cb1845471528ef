"""One slurmdbd with its MariaDB on the head of the first site, which all clusters of a lab report to."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from lab.processes import wait_until
from lab.shape import JOB_USER

if TYPE_CHECKING:
    from lab.lab import Lab

PORT = 6819
UP_SECONDS = 60
SOCKET = "/run/mysqld/mysqld.sock"  # where Debian's client library looks

SLURMDBD_CONF = """\
AuthType=auth/munge
DbdHost={site}
DbdAddr={address}
DbdPort={port}
SlurmUser=slurm
LogFile={directory}/log/slurmdbd.log
PidFile=/run/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=slurm
StorageLoc=slurm_acct_db
MessageTimeout=5
"""

# The database listens on a socket only, and knows its users by their system accounts.
START_MARIADB = """\
mkdir -p /run/mysqld {directory}/mysql
chown mysql: /run/mysqld {directory}/mysql
mariadb-install-db --no-defaults --user=mysql --datadir={directory}/mysql --auth-root-authentication-method=socket \
    --skip-test-db >{directory}/log/mariadb-install.log 2>&1
mariadbd --no-defaults --user=mysql --datadir={directory}/mysql --socket={socket} --pid-file=/run/mysqld/mysqld.pid \
    --skip-networking --skip-name-resolve --innodb-buffer-pool-size=64M --innodb-lock-wait-timeout=900 \
    --innodb-flush-log-at-trx-commit=0 >{directory}/log/mariadb.log 2>&1 </dev/null &
"""
GRANT = """\
CREATE USER slurm@localhost IDENTIFIED VIA unix_socket;
GRANT ALL ON slurm_acct_db.* TO slurm@localhost;
"""


def configure(directory: Path, site: str, address: str) -> None:
    """Write slurmdbd.conf for the head of a site; it must be closed to all but Slurm's account."""
    conf = directory / "slurm" / site / "slurmdbd.conf"
    conf.touch(mode=0o600)
    conf.write_text(SLURMDBD_CONF.format(site=site, address=address, port=PORT, directory=directory))
    shutil.chown(conf, "slurm", "slurm")


def start(lab: Lab) -> None:
    """Start MariaDB and slurmdbd, and register the clusters, an account and the job user."""
    head, clusters = next(iter(lab.sites)), list(lab.sites)
    mariadb = ["--no-defaults", f"--socket={SOCKET}"]
    lab.run(head, ["sh", "-ec", START_MARIADB.format(directory=lab.directory, socket=SOCKET)], user="root")
    _wait(lab, ["mariadb-admin", *mariadb, "ping"], "MariaDB", "mariadb")
    lab.run(head, ["mariadb", *mariadb], user="root", input=GRANT)
    lab.run(head, ["slurmdbd"], user="root")
    _wait(lab, ["sacctmgr", "--noheader", "show", "cluster"], "slurmdbd", "slurmdbd")
    for words in (
        ["cluster", *clusters],
        ["account", "lab", f"cluster={','.join(clusters)}"],
        ["user", JOB_USER, "account=lab"],
    ):
        lab.run(head, ["sacctmgr", "--immediate", "add", *words], user="root")
    if lab.accounting == "federation":
        words = ["federation", "lab", f"clusters={','.join(clusters)}"]
        lab.run(head, ["sacctmgr", "--immediate", "add", *words], user="root")


def wait_registered(lab: Lab) -> None:
    """Return when slurmdbd knows where every controller is, which `-M` needs, or the federation is complete."""
    head = next(iter(lab.sites))
    query = ["sacctmgr", "--noheader", "--parsable2", "show", "cluster", "format=controlhost"]

    def registered() -> bool:
        hosts = lab.run(head, query, user="root").stdout.split()
        if lab.accounting == "federation":
            members = lab.run(head, ["scontrol", "show", "federation"], user="root").stdout
            return members.count("Synced:Yes") == len(lab.sites) - 1
        return len(hosts) == len(lab.sites)

    wait_until(registered, UP_SECONDS, lambda: f"clusters are not registered; slurmdbd says:\n{lab.log('slurmdbd')}")


def _wait(lab: Lab, command: list[str], what: str, log: str) -> None:
    head = next(iter(lab.sites))
    wait_until(
        lambda: lab.run(head, command, user="root", check=False).returncode == 0,
        UP_SECONDS,
        lambda: f"{what} does not answer; it says:\n{lab.log(log)}",
    )
