"""The container that the processes of a site run in, as a site file describes it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from hetrl.describe.yaml_file import Strict

# HOST or HOST:INSIDE or HOST:INSIDE:MODE; the runtimes read a comma as the next one.
Bind = Annotated[str, Field(pattern=r"^[^:,]+(:[^:,]+){0,2}$")]


class Container(Strict):
    """An image and what starts processes in it; in a site file, the image alone stands for one of apptainer."""

    image: str
    runtime: Literal["apptainer", "pyxis", "podman-hpc"] = "apptainer"
    binds: tuple[Bind, ...] = ()  # besides the run's own directory
    options: tuple[str, ...] = ()  # more words of the runtime: of `apptainer exec`, `podman-hpc run`, or srun for pyxis


def _of_an_image(value: object) -> object:
    return {"image": value} if isinstance(value, str) else value


ContainerEntry = Annotated[Container, BeforeValidator(_of_an_image)]
