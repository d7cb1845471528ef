"""Slices of GPUs (NVIDIA's Multi-Instance GPU, MIG) among Slurm's GRES types: `gpu:nvidia_a100_3g.20gb:4`.

AutoDetect=nvml of gres.conf(5) makes such names; people write others: 3g.20gb, mig-3g-20gb.
"""

from __future__ import annotations

import re

from hetrl.gpus import GpuType, gpu_catalogue, words

_PROFILE = re.compile(r"(?<![0-9])([1-7]g)[._-]?([0-9]+)gb")
_ROUNDED = 0.9  # of a slice's memory: the gigabytes in a profile's name are not less


def profile_of(gres: str) -> str | None:
    """Return the profile that a GRES type names, as 3g.20gb; None where it names none."""
    found = _PROFILE.search(gres.lower())
    return f"{found[1]}.{found[2]}gb" if found else None


def slices_of(gres: str) -> list[str]:
    """Return the catalogue's slices that a GRES type may be, by its profile and what it says of the GPU."""
    said, catalogue = words(gres), gpu_catalogue()
    families = said & {name.split("-")[0] for name in catalogue}
    gpus = {
        one.slice_of: one.name
        for one in catalogue.values()
        if one.slice_of and one.name == f"{one.slice_of}-{profile_of(gres)}"
        if not families or one.slice_of.split("-")[0] in families
    }
    exact = [name for gpu, name in gpus.items() if words(gpu) <= said]
    return exact or list(gpus.values())


def refusal(gres: str, gpu: GpuType) -> str | None:
    """Return why the GPUs of a GRES type cannot be of a type, and what to write; None: they can."""
    profile = profile_of(gres)
    if profile is None:
        return None
    if not gpu.slice_of:
        return f"gres: {gres} is a slice of a GPU (MIG), {gpu.name} a whole one; {remedy(gres)}"
    if gpu.name in gpu_catalogue():
        return None if gpu.name in slices_of(gres) else f"gres: {gres} is not {gpu.name}; {remedy(gres)}"
    size = float(profile.removesuffix("gb").split(".")[1])
    if size < _ROUNDED * gpu.memory_gb:
        return f"gres: {gres} is a slice of {size:g} GB, {gpu.name} has {gpu.memory_gb:g} GB; correct its memory_gb"
    return None


def remedy(gres: str) -> str:
    """Return what to write in the site's file for the GPUs of a GRES type that is a slice."""
    known = slices_of(gres)
    if not known:
        return "the catalogue has no such slice: describe it under `gpus`, with `slice_of`, and map it to that"
    others = f" or {', '.join(known[1:])}, by the GPU that it is of" if known[1:] else ""
    return f"write `gres: {{{gres}: {known[0]}}}`{others}; describe that of any other GPU under `gpus`, with `slice_of`"
