"""Whether this machine can have a lab."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from lab.processes import missing_of

TOOLS = ("gcc", "ip", "iperf3", "mariadbd", "munged", "nft", "nsenter", "ping", "setpriv", "slurmctld", "slurmd")
TOOLS += ("slurmdbd", "ssh", "sshd", "unshare")
TUN = Path("/dev/net/tun")


def skip_unless_available() -> None:
    """Skip the tests, with the reason, where a lab cannot be."""
    if os.geteuid() != 0:
        pytest.skip("the lab needs root")
    if not TUN.exists():
        pytest.skip(f"the lab needs {TUN}")
    if missing := missing_of(TOOLS):
        pytest.skip(f"the lab needs {', '.join(missing)}; `make lab-setup` installs them")
    if subprocess.run(["unshare", "--net", "--mount", "--pid", "--fork", "true"], check=False).returncode != 0:
        pytest.skip("the lab needs to make namespaces (CAP_SYS_ADMIN)")
