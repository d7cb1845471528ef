"""One Megatron task inside its own torch world: rank 0 hears the run, every rank does the same work.

rank 0:   message -> share -> work        the others:   share -> work
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from hetrl.runtime import wire

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
