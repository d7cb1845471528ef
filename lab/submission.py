"""configs/lab.yaml on a lab's clusters: what discover and probe measure there, and its submission."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence

from lab.lab import Lab
from lab.processes import LabError, enter, environment_of
from lab.shape import JOB_USER, RUN_SITES

LAUNCHER = "alpha"  # the head whose user submits
CONFIG = "checkout/configs/lab.yaml"
SITE_FILES = [f"checkout/topology/sites/lab-{site}.yaml" for site in RUN_SITES]
HETRL = "venv/bin/hetrl"


def submit(lab: Lab, arguments: Sequence[str], terminal: Mapping[str, str]) -> None:
    """Become `hetrl submit` on the launcher's head, after the measurements that this lab still lacks."""
    command, environment = enter(lab.pid(LAUNCHER), JOB_USER), environment_of(JOB_USER, terminal)
    measured = lab.home(LAUNCHER) / "topology/measured"
    for words, found in ((["discover", *SITE_FILES], "alpha.json"), (["probe", CONFIG], "links-*.json")):
        if any(measured.glob(found)):
            continue
        print("hetrl", *words, flush=True)
        code = subprocess.run([*command, HETRL, *words], env=environment, check=False).returncode
        if code:
            raise LabError(f"{LAUNCHER}: hetrl {words[0]} ended with code {code}")
    print("hetrl submit", CONFIG, *arguments, flush=True)
    os.execvpe(command[0], [*command, HETRL, "submit", CONFIG, *arguments], environment)
