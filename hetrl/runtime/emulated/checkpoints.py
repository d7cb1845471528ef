"""Checkpoints of emulated trainers: on the disk as real ones are, of what a controller wants kept and nothing else.

So keepers find them, copy them to other sites and prove them as they do with real ones.
"""

from __future__ import annotations

from collections.abc import Sequence

from hetrl.errors import HetrlError
from hetrl.runtime import wire
from hetrl.runtime.checkpoints import files, writing
from hetrl.runtime.checkpoints.places import CheckpointPlaces


def save(places: CheckpointPlaces, message: wire.Save, buffers: Sequence[bytes | memoryview]) -> None:
    """Write what belongs to a step; `finish_save` makes a checkpoint of it."""
    partial = writing.begin(places.written(message.step))
    kept = {"version": message.version, "progress": message.progress}
    writing.write_json(partial / files.STATE, {"format": files.FORMAT, "extra": kept})
    if buffers and len(buffers[0]):
        writing.write(partial / files.SAMPLES, buffers[:1])


def finish_save(places: CheckpointPlaces, message: wire.FinishSave) -> None:
    """Make what was saved of a step whole, and remove older ones as real trainers do."""
    writing.finish(places.written(message.step))
    files.keep_last(places.own, message.keep, message.keep_gb, message.spared)


def restore(places: CheckpointPlaces, step: int) -> tuple[wire.Restored, bytes]:
    """Return what was kept of a step, by the latest run that has it, and its samples; HetrlError where none has."""
    found = places.find().get(step)
    if found is None:
        raise HetrlError(f"{places.written(step).name}: this site has no such checkpoint")
    kept = files.read_state(found)["extra"]
    restored = wire.Restored(step=step, version=kept["version"], progress=kept["progress"])
    return restored, places.read(step, files.SAMPLES)
