"""One Megatron task inside its own torch world: rank 0 hears the run, every rank does the same work.

rank 0:   message -> share -> execute     the others, until it says Finish:   share -> execute     (`follow`)
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from hetrl.errors import HetrlError
from hetrl.runtime import wire
from hetrl.runtime.checkpoints.files import SAMPLES
from hetrl.runtime.checkpoints.places import CheckpointPlaces
from hetrl.runtime.hang import HangWatch
from hetrl.runtime.megatron.batch import TokenBatch
from hetrl.runtime.megatron.engine import MegatronEngine
from hetrl.runtime.run.checkpoint_places import take_up
from hetrl.runtime.wire.arrays import unpack

_BATCH_ARRAYS = ("tokens", "lengths", "mask")
Described = tuple[str, tuple[int, ...], str]  # name, shape and dtype of a tensor
_encoder, _decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(Described)


def share(message: wire.Message | None, buffers: Sequence[bytes | memoryview] = ()) -> tuple[wire.Message, list[bytes]]:
    """Hand a message of rank 0 to every rank (collective); the other ranks pass None and get what rank 0 passed."""
    frames = [] if message is None else [wire.encode_struct(message), *buffers]
    received = _broadcast_frames(frames)
    return wire.decode_message(received[0]), received[1:]


def _broadcast_frames(frames: Sequence[bytes | memoryview]) -> list[bytes]:
    """Broadcast byte strings from rank 0: their number, their lengths, then all bytes at once."""
    count = torch.tensor([len(frames)], dtype=torch.int64)
    dist.broadcast(count, 0)
    if not count.item():
        return []
    lengths = torch.zeros(int(count.item()), dtype=torch.int64)
    if frames:
        lengths = torch.tensor([memoryview(frame).nbytes for frame in frames], dtype=torch.int64)
    dist.broadcast(lengths, 0)
    payload = torch.empty(int(lengths.sum().item()), dtype=torch.uint8)
    if frames:
        joined = b"".join(bytes(frame) for frame in frames)
        payload = torch.from_numpy(np.frombuffer(joined, dtype=np.uint8).copy())
    dist.broadcast(payload, 0)
    data, ends = payload.numpy().tobytes(), lengths.cumsum(0).tolist()
    return [data[end - length : end] for end, length in zip(ends, lengths.tolist(), strict=True)]


def share_tensors(tensors: Iterable[tuple[str, torch.Tensor]] | None) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield rank 0's tensors on every rank, one at a time (collective); the other ranks pass None."""
    source = iter(tensors) if tensors is not None else None
    while True:
        item = next(source, None) if source is not None else None
        described = [] if item is None else [_encoder.encode(_described(*item))]
        received = _broadcast_frames(described)
        if not received:
            return
        name, shape, dtype = _decoder.decode(received[0])
        tensor = item[1].contiguous() if item is not None else torch.empty(shape, dtype=getattr(torch, dtype))
        dist.broadcast(tensor, 0)
        yield name, tensor


def _described(name: str, tensor: torch.Tensor) -> Described:
    return name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")


def batch_of(message: wire.Score | wire.Train, buffers: Iterable[bytes | memoryview]) -> TokenBatch:
    """Read the batch that a request carries; a Score has no mask: every token after the first is a target."""
    arrays = unpack(message.arrays, list(buffers))
    tokens, lengths = arrays["tokens"], arrays["lengths"]
    mask = arrays.get("mask")
    if mask is None:
        columns = torch.arange(tokens.shape[1]).numpy()
        mask = (columns[None, :] > 0) & (columns[None, :] < lengths[:, None])
    extras = {name: array for name, array in arrays.items() if name not in _BATCH_ARRAYS}
    return TokenBatch(tokens=tokens, lengths=lengths, mask=mask, extras=extras)


def execute(
    engine: MegatronEngine, message: wire.Message, buffers: list[bytes], places: CheckpointPlaces, watch: HangWatch
) -> Any:
    """Do what a shared request asks for (collective), under watch; rank 0 gets the result."""
    with watch.over(type(message).__name__):
        return _execute(engine, message, buffers, places)


def _execute(engine: MegatronEngine, message: wire.Message, buffers: list[bytes], places: CheckpointPlaces) -> Any:
    match message:
        case wire.Score(temperature=temperature, what=what):
            return engine.score(batch_of(message, buffers), temperature, what)
        case wire.Train(settings=settings):
            return engine.train_step(batch_of(message, buffers), settings)
        case wire.Sleep(idle_state=state):
            return engine.sleep(offload=state == "offload")
        case wire.Wake():
            return engine.wake()
        case wire.Save(step=step):
            kept = {SAMPLES: buffers[0]} if buffers and buffers[0] else {}
            return engine.save(places.written(step), {"version": message.version, "progress": message.progress}, kept)
        case wire.FinishSave(wait=wait):
            return engine.finish_save(wait=wait)
        case wire.Restore(step=step):
            return take_up(places, engine, step)
    raise HetrlError(f"a Megatron task cannot do {type(message).__name__}")


@contextmanager
def following(rank: int) -> Iterator[None]:
    """Say as HetrlError that another rank is gone, where that ends what rank 0 shares."""
    try:
        yield
    except RuntimeError as error:
        if not (isinstance(error, dist.DistError) or "gloo" in str(error)):
            raise
        logging.getLogger(__name__).info("%s", error)
        raise HetrlError(f"rank {rank}: the other ranks are gone; see the log of rank 0") from None


def follow(engine: MegatronEngine, places: CheckpointPlaces, watch: HangWatch) -> None:
    """Be one of the other ranks: do what rank 0 shares until it says Finish."""
    while True:
        message, buffers = share(None)
        match message:
            case wire.Finish():
                return
            case wire.WeightsEnd():
                engine.load(share_tensors(None))
            case wire.Publish():
                for _ in engine.export():
                    pass
            case _:
                execute(engine, message, buffers, places, watch)
