"""An experiment on a lab's clusters: the logins, what discover and probe measure there, and its submission."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

from lab import ssh
from lab.lab import Lab
from lab.processes import LabError, enter, environment_of
from lab.shape import JOB_USER, RUN_SITES

LAUNCHER = "alpha"  # the head whose user submits
CHECKOUT, CONFIG = "checkout", "configs/lab.yaml"  # this directory, as the launcher's user sees it
SITE_FILES = [f"{CHECKOUT}/topology/sites/lab-{site}.yaml" for site in RUN_SITES]
HETRL = "venv/bin/hetrl"


def submit(lab: Lab, config: str, arguments: Sequence[str], terminal: Mapping[str, str]) -> None:
    """Become `hetrl submit` on the launcher's head, after the logins and measurements that this lab still lacks.

    `config` is a file of this directory.
    """
    config = f"{CHECKOUT}/{config}"
    log_in(lab)
    command, environment = enter(lab.pid(LAUNCHER), JOB_USER), environment_of(JOB_USER, terminal)
    measured = lab.home(LAUNCHER) / "topology/measured"
    for words, found in ((["discover", *SITE_FILES], "alpha.json"), (["probe", config], "links-*.json")):
        if any(measured.glob(found)):
            continue
        print("hetrl", *words, flush=True)
        code = subprocess.run([*command, HETRL, *words], env=environment, check=False).returncode
        if code:
            raise LabError(f"{LAUNCHER}: hetrl {words[0]} ended with code {code}")
    print(f"what it writes is under {lab.home(LAUNCHER)} of this machine", flush=True)
    print("hetrl submit", config, *arguments, flush=True)
    os.execvpe(command[0], [*command, HETRL, "submit", config, *arguments], environment)


def in_checkout(topology: Mapping[str, Any]) -> dict[str, Any]:
    """Return the section of an experiment of this directory for a file beside the checkout."""
    sites, links = topology["sites"], topology["links"]
    return {**topology, "sites": [f"{CHECKOUT}/{site}" for site in sites], "links": f"{CHECKOUT}/{links}"}


def log_in(lab: Lab) -> None:
    """Make the launcher's connections to the sites that ask for a second factor, where they do not stand yet."""
    for name, site in lab.sites.items():
        if not site.second_factor or name == LAUNCHER:
            continue
        if lab.run(LAUNCHER, ["ssh", "-O", "check", name], check=False).returncode:
            print(f"ssh -fNM {name}    # with its second factor; hetrl takes this connection", flush=True)
            ssh.log_in(lab, LAUNCHER, name)
