"""How the processes of a site start in its container. Pure functions.

Sources: apptainer-exec(1); podman-run(1), which podman-hpc passes its words to; the README of pyxis, a plugin of srun.
"""

from __future__ import annotations

from collections.abc import Sequence

from hetrl.describe.container import Container
from hetrl.describe.sites import SiteFile

_OURS = ("PYTHONPATH", "PYTHONUNBUFFERED", "CUDA_VISIBLE_DEVICES")  # win over what an image sets


def python_of(file: SiteFile, directory: str) -> tuple[str, ...]:
    """Return the words that start the site's interpreter, inside its container where words do that."""
    return (*file.prefix, *_words(file.container, [directory], gpus=True), file.python)


def step_options(file: SiteFile, directory: str) -> tuple[str, ...]:
    """Return the options that every srun of the site has."""
    return (f"--cpu-bind={file.cpu_bind}", *srun_options(file, directory))


def srun_options(file: SiteFile, directory: str) -> tuple[str, ...]:
    """Return the options of srun that start a step in the site's container: none, unless it is srun that does that."""
    container = file.container
    if container is None or container.runtime != "pyxis":
        return ()
    mounts = [bind if ":" in bind else f"{bind}:{bind}" for bind in (directory, *container.binds)]
    return (
        f"--container-image={container.image}",
        f"--container-mounts={','.join(mounts)}",
        f"--container-workdir={directory}",
        f"--container-env={','.join(_OURS)}",
        *container.options,
    )


def login_python_of(file: SiteFile) -> tuple[str, ...] | None:
    """Return the words that start the interpreter on a login node, which has no GPU; None where only jobs can."""
    if file.container is not None and file.container.runtime == "pyxis":
        return None
    return (*_words(file.container, [], gpus=False), file.python)


def _words(container: Container | None, binds: Sequence[str], gpus: bool) -> tuple[str, ...]:
    if container is None or container.runtime == "pyxis":
        return ()
    binds = (*binds, *container.binds)
    if container.runtime == "apptainer":
        mounts = [word for bind in binds for word in ("--bind", bind)]
        return ("apptainer", "exec", *["--nv"] * gpus, *mounts, *container.options, container.image)
    volumes = [f"--volume={bind if ':' in bind else f'{bind}:{bind}'}" for bind in binds]
    # The network and the memory of the host: gateways are reached at the node's address, ranks share memory. The
    # environment of the host, and above that of the image what is ours.
    ours = [f"--env={name}" for name in _OURS]
    job = ["--gpu", "--network=host", "--ipc=host", "--env-host", *ours, f"--workdir={binds[0]}"] if gpus else []
    return ("podman-hpc", "run", "--rm", *job, *volumes, *container.options, container.image)
