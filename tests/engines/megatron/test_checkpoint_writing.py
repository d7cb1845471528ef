"""Checkpoints are written by all ranks beside the steps, and are whole or not there whatever happens to one rank."""

from __future__ import annotations

import json
import resource
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from hetrl.runtime.checkpoints import files as checkpoint
from tests.engines.megatron.megatron_worlds import (
    LAYOUTS,
    Job,
    Worlds,
    message_of,
    model_config,
    start_engine,
    step_job,
    weights,
    written,
)
from tests.engines.megatron.test_checkpoint_files import newest

WAIT_SECONDS = 60.0


def job_of(layout: str, **changes: Any) -> Job:
    return step_job(model_config(tie_word_embeddings=True), LAYOUTS[layout], **changes)


def stepped(rank: int, port: int, job: Job) -> Any:
    """Return an engine that has taken a step."""
    engine = start_engine(rank, port, job)
    engine.load(weights(job.config))
    engine.train_step(job.batch, job.settings)
    return engine


@contextmanager
def replaced_open(act: Callable[[Path], None]) -> Iterator[None]:
    """Let `act` happen whenever this process begins to write a file of tensors."""
    plain = Path.open

    def opened(self: Path, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if mode == "wb" and self.suffix == ".safetensors":
            act(self)
        return plain(self, mode, *args, **kwargs)

    Path.open = opened  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        Path.open = plain  # type: ignore[method-assign]


@contextmanager
def full_disk() -> Iterator[None]:
    """Make this process fail to write files beyond 50 kB."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def forbidden() -> Any:
    """Make this process fail to make files."""

    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    return replaced_open(refuse)


def contents(directory: Path) -> dict[str, bytes]:
    """Return the bytes of all files that hold or place tensors."""
    return {path.name: path.read_bytes() for path in directory.iterdir() if "safetensors" in path.name}


def overtaken(rank: int, port: int, argument: tuple[Job, Path]) -> dict[str, Any]:
    """Save once in peace, and once with a disk that waits while a step is taken."""
    job, root = argument
    engine, disk, seen = stepped(rank, port, job), threading.Event(), {}
    engine.save(checkpoint.path_of(root, 1), {})
    engine.finish_save()
    with replaced_open(lambda _: disk.wait(WAIT_SECONDS)):
        engine.save(checkpoint.path_of(root, 2), {})
        before = dict(engine.export())
        engine.train_step(job.batch, job.settings)
        after = dict(engine.export())
        seen["whole before"] = engine.finish_save(wait=False)
        seen["newest before"] = newest(root)
        if rank == 0:  # the other ranks' files are not there yet
            disk.set()
        seen["whole at one rank"] = engine.finish_save(wait=False)
        disk.set()
        seen["whole"] = engine.finish_save()
    seen["weights changed"] = any(not before[name].equal(after[name]) for name in after)
    return seen


def test_a_step_beside_the_writing_does_not_change_what_is_written(worlds: Worlds, tmp_path: Path) -> None:
    for layout, changes in (("data", {}), ("tensor-pipeline", {"distributed": False, "dtype": "bfloat16"})):
        root = tmp_path / layout
        job = job_of(layout, **changes)
        first, *others = worlds.run(overtaken, job.layout.world_size, (job, root))
        assert first["weights changed"]
        for seen in (first, *others):
            assert not seen["whole before"]
            assert not seen["whole at one rank"]
            assert seen["newest before"] == checkpoint.path_of(root, 1)
            assert seen["whole"]
        assert newest(root) == checkpoint.path_of(root, 2)
        assert contents(checkpoint.path_of(root, 1)) == contents(checkpoint.path_of(root, 2))


def saved(rank: int, port: int, argument: tuple[Job, Path]) -> bool:
    """Take a step and leave it to the end of the engine to complete the checkpoint."""
    job, directory = argument
    engine = stepped(rank, port, job)
    engine.save(directory, {})
    engine.close()
    return (directory / checkpoint.COMPLETE).is_file()


def test_the_files_of_all_ranks_are_about_equal_and_whole_when_the_engine_closes(
    worlds: Worlds, tmp_path: Path
) -> None:
    directory = tmp_path / "step-1"
    assert worlds.run(saved, 4, (job_of("tensor-data"), directory)) == [True] * 4
    for pattern in ("model-*", "optimizer-rank-*"):
        sizes = [path.stat().st_size for path in directory.glob(pattern)]
        assert len(sizes) == 4
        assert max(sizes) < 1.5 * min(sizes)
    index = json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"]
    assert set(index.values()) == {path.name for path in directory.glob("model-*.safetensors")}


def troubled(rank: int, port: int, argument: tuple[Job, Path]) -> dict[str, str]:
    """Let one rank's disk fail in several ways and return what each rank is told."""
    job, root = argument
    engine, messages = stepped(rank, port, job), {}
    engine.save(checkpoint.path_of(root, 1), {})
    messages["sound"] = message_of(engine.finish_save)
    for name, trouble in (("full", full_disk), ("forbidden", forbidden)):
        with trouble() if rank == 1 else nullcontext():
            messages[f"{name}: save"] = message_of(lambda: engine.save(checkpoint.path_of(root, 2), {}))
            messages[name] = message_of(engine.finish_save)
        engine.train_step(job.batch, job.settings)  # the engine goes on
        assert engine.finish_save(), "nothing is being written"
    with forbidden() if rank == 1 else nullcontext():
        engine.save(checkpoint.path_of(root, 3), {})
        messages["next save"] = message_of(lambda: engine.save(checkpoint.path_of(root, 4), {}))
    messages["left"] = " ".join(sorted(path.name for path in root.iterdir()))
    torch.distributed.barrier()
    engine.save(checkpoint.path_of(root, 5), {})
    messages["good again"] = message_of(engine.finish_save)
    return messages


def test_one_rank_that_cannot_write_is_named_on_all_and_older_checkpoints_stay(worlds: Worlds, tmp_path: Path) -> None:
    for number, messages in enumerate(worlds.run(troubled, 3, (job_of("three-stages"), tmp_path))):
        sound = ("sound", "full: save", "forbidden: save", "good again")
        assert {name: messages[name] for name in sound} == dict.fromkeys(sound, "no error")
        expected = {"full": ("2", "[Errno 27]"), "forbidden": ("2", "[Errno 13]"), "next save": ("3", "[Errno 13]")}
        for name, (step, cause) in expected.items():
            message = messages[name]
            assert f"step-0000000{step}: the checkpoint could not be written: {cause}" in message
            assert "step-0000000" + step + ".partial/optimizer-rank-00001.safetensors" in message
            assert message.startswith("rank 1: ") == (number != 1)
        assert messages["left"] == "step-00000001"
    assert newest(tmp_path) == checkpoint.path_of(tmp_path, 5)


def apart(rank: int, port: int, argument: tuple[Job, Path]) -> dict[str, str]:
    """Save where the last two of four ranks see another disk than the first two; then with a full disk at rank 1."""
    job, root = argument
    engine, site = stepped(rank, port, job), root / f"site-{rank // 2}"
    engine.save(root / "together", {})
    messages = {"together": message_of(engine.finish_save)}
    engine.save(checkpoint.path_of(site, 1), {})
    messages["apart"] = message_of(engine.finish_save)
    with full_disk() if rank == 1 else nullcontext():
        messages["full: save"] = message_of(lambda: engine.save(checkpoint.path_of(site, 2), {}))
        messages["full"] = message_of(engine.finish_save)
    return messages


def test_ranks_of_another_site_send_what_they_hold(worlds: Worlds, tmp_path: Path) -> None:
    for messages in worlds.run(apart, 4, (job_of("tensor-data"), tmp_path)):
        sound = ("together", "apart", "full: save")
        assert {name: messages[name] for name in sound} == dict.fromkeys(sound, "no error")
        assert "step-00000002: the checkpoint could not be written: [Errno 27]" in messages["full"]
    directory = checkpoint.path_of(tmp_path / "site-0", 1)
    assert contents(directory) == contents(tmp_path / "together")
    assert [path.name for path in (tmp_path / "site-0").iterdir()] == [directory.name]
    assert not (tmp_path / "site-1").exists()
    for kind in ("exp_avg", "exp_avg_sq"):
        assert not any(tensor.isnan().any() for tensor in written(directory, kind).values())
