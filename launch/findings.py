"""What a run needs of a place, and what was found there: the same on login nodes, on compute nodes and here.

Pure functions from what a place said to findings, each with its remedy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from typing import Literal

from hetrl.describe.sites import SiteFile
from hetrl.problem import PLACES, Problem
from launch.run_directory import with_absolute_paths

PACKAGES_OF_ENGINE = {"megatron": ("torch", "megatron-core"), "vllm": ("torch", "vllm")}
PACKAGES = ("pyzmq", "msgspec", "pydantic", "numpy")
_ENGINES = ("torch", "megatron-core", "vllm")


@dataclass(frozen=True)
class Wish:
    """What the run asks of every site."""

    walltime_seconds: float
    versions: dict[str, str]  # package -> the version that the run was made with
    models: tuple[str, ...] = ()  # their directories, at the same path everywhere, or where a site's `paths` say
    data: str = ""  # a file or directory that the site which leads reads


@dataclass(frozen=True)
class Finding:
    """One precondition: `verdict`, what was found and, unless it holds, what to do."""

    site: str
    what: str
    verdict: Literal["ok", "warning", "failed"]
    found: str
    remedy: str = ""


def wish_of(problem: Problem) -> Wish:
    """Return what a run of an experiment asks of every site."""
    experiment = with_absolute_paths(problem.experiment)
    sections = [(getattr(experiment, section), keys) for section, keys in PLACES.items() if section != "data"]
    named = [value for section, keys in sections for key in keys if (value := getattr(section, key))]
    models = tuple(dict.fromkeys(value for value in named if "/" in value))
    return Wish(experiment.launch.walltime_seconds, installed_versions(), models, experiment.data.path or "")


def may_lead(site: SiteFile) -> bool:
    """Return whether the site may be the one that leads, where the controller reads the data: that of the trainer."""
    return "megatron" in site.engines


def installed_versions() -> dict[str, str]:
    """Return the versions of the packages here that every site should have; a login node may have few of them."""
    found = {}
    for name in (*PACKAGES, *_ENGINES):
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def packages_of(site: SiteFile) -> tuple[str, ...]:
    """Return the packages that the processes of a site need."""
    return (*PACKAGES, *dict.fromkeys(name for engine in site.engines for name in PACKAGES_OF_ENGINE[engine]))


def packages_found(site: str, found: Mapping[str, str | None], wish: Wish) -> Iterator[Finding]:
    """Judge the versions of a site's packages, None where one is not installed; `python` is among them."""
    missing = sorted(name for name, version in found.items() if version is None)
    if missing:
        remedy = "make the environment of environment.yml there, or take the engine out of `engines`"
        yield Finding(site, "packages", "failed", f"not installed: {', '.join(missing)}", remedy)
    other = [
        f"{name} {version}, not {wish.versions[name]}"
        for name, version in found.items()
        if version is not None and name in wish.versions and not _same_release(version, wish.versions[name])
    ]
    if other:
        remedy = "install the versions of environment.yml: engines of two versions may give two log-probs"
        yield Finding(site, "versions", "warning", "; ".join(other), remedy)
    if not missing and not other:
        shown = [f"{name} {found[name]}" for name in _ENGINES if found.get(name)]
        yield Finding(site, "packages", "ok", ", ".join([f"python {found['python']}", *shown]))


def _same_release(version: str, other: str) -> bool:
    """Compare without the local part: 2.13.0+cu130 is 2.13.0."""
    return version.split("+")[0] == other.split("+")[0]


def models_found(site: str, wish: Wish, missing: Sequence[str], place: Callable[[str], str] = str) -> Iterator[Finding]:
    """Judge which of the models' directories are missing at a site; `place` says where one of the experiment's is."""
    if missing:
        remedy = "copy it there, correct the experiment, or say under paths in the site's file where it is there"
        yield Finding(site, "models", "failed", f"no config.json in {', '.join(missing)}", remedy)
    elif wish.models:
        yield Finding(site, "models", "ok", ", ".join(map(place, wish.models)))


def data_found(site: SiteFile, wish: Wish, there: bool) -> Finding:
    """Judge whether the data is there, at a site that may lead."""
    path = site.place(wish.data)
    if there:
        return Finding(site.name, "data", "ok", path)
    remedy = "the site that leads reads it: copy it there, or say under paths in the site's file where it is there"
    return Finding(site.name, "data", "failed", f"{path} cannot be read", remedy)
