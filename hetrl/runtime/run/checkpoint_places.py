"""Taking a checkpoint up over several sites: ranks that do not see it get it from one that does."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hetrl.errors import HetrlError
from hetrl.runtime.checkpoints import files, writing
from hetrl.runtime.checkpoints.places import CheckpointPlaces
from hetrl.runtime.megatron.agreement import agree, everywhere, receive, send, write_arriving
from hetrl.runtime.megatron.engine import MegatronEngine
from hetrl.runtime.megatron.snapshot import CHUNK_BYTES


def take_up(places: CheckpointPlaces, engine: MegatronEngine, step: int) -> dict[str, Any]:
    """Let the engine have the state of a step, and return what was kept beside it (collective).

    Sites that do not have the checkpoint get it from one that has. Raises HetrlError on every rank where none has, and
    where a file of one is not what was written.
    """
    directory = bring(places.find().get(step), places.written(step))
    _prove(directory, places)
    return engine.restore(directory)


def _prove(directory: Path, places: CheckpointPlaces) -> None:
    """Let the ranks of each site prove what they are about to read there (collective)."""
    failure: Exception | None = None
    try:
        writing.prove_again(directory, places.share, places.shares)
    except (HetrlError, OSError) as error:
        failure = error
    agree(failure, f"{directory}: the checkpoint could not be read")


def bring(found: Path | None, target: Path) -> Path:
    """Return where this rank sees a checkpoint, brought to `target` at each site that does not have it (collective).

    `found` is where this rank sees it; one that sees none, or another one than the lowest rank that sees one, gets that
    over the network. Raises HetrlError on every rank where nobody sees one, or a disk fails.
    """
    sees = everywhere(found is not None)
    if True not in sees:
        raise HetrlError(f"{target.name}: no rank sees this checkpoint")
    source = sees.index(True)
    wanted = torch.tensor([_identity(found) if found is not None else 0])
    dist.broadcast(wanted, source)
    while False in (sees := everywhere(found is not None and _identity(found) == wanted.item())):
        receiver, failure = sees.index(False), None
        if dist.get_rank() == source:
            assert found is not None
            _send_all(found, receiver)
        elif dist.get_rank() == receiver:
            failure = _receive_all(target, source)
        agree(failure, f"{target}: the checkpoint could not be written")
        if target.is_dir() and _identity(target) == wanted.item():  # what one rank got, others of its site see too
            found = target
    assert found is not None
    return found


def _identity(checkpoint: Path) -> int:
    """Return the number that a checkpoint got when it was begun."""
    return int(files.read_state(checkpoint)["id"])


def _send_all(checkpoint: Path, to: int) -> None:
    """Send every file of a checkpoint, behind their names."""
    names = [*json.loads((checkpoint / files.COMPLETE).read_text(encoding="utf-8")), files.COMPLETE]
    send([_bytes_of(json.dumps(names).encode())], to)
    for name in names:
        send(_parts(checkpoint / name), to)


def _parts(path: Path) -> Iterator[torch.Tensor]:
    with path.open("rb") as file:
        while data := file.read(CHUNK_BYTES):
            yield _bytes_of(data)


def _receive_all(target: Path, source: int) -> Exception | None:
    """Write what `_send_all` sends; it has its name once everything is there and proven."""
    failure: Exception | None = None
    try:
        writing.begin(target)
    except OSError as error:
        failure = error
    names = json.loads(b"".join(bytes(part.numpy()) for part in receive(source)))
    for name in names:
        unwritten = write_arriving(files.partial_of(target) / Path(name).name, source)
        failure = failure or unwritten
    try:
        if failure is None:
            writing.prove(target)
            writing.give_name(target)
            return None
    except (HetrlError, OSError) as error:
        failure = error
    writing.discard(target)
    return failure


def _bytes_of(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
