"""Samples under way, finished or not, as a checkpoint keeps them: a run that goes on draws none of them again.

    {number of the prompt: [sample, ...]}     msgpack, then zstandard

A sample has its tokens so far, their log-probs, and the weight version of each. Sampling goes on behind them as it
would have: what comes next depends on the seed of the sample and on how many tokens it has.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import msgspec
import zstandard

from hetrl.runtime import wire

MOST_BYTES = 2**29  # before they are packed; what is beyond is drawn again
Samples = tuple[wire.Sample, ...]

log = logging.getLogger(__name__)
_decoder = msgspec.msgpack.Decoder(dict[int, Samples])


def is_complete(sample: wire.Sample, max_tokens: int) -> bool:
    """Whether a sample ends here, rather than at the end of a stretch."""
    return bool(sample.tokens) and (sample.finish_reason != "length" or len(sample.tokens) >= max_tokens)


def pack(samples: Mapping[int, Sequence[wire.Sample]]) -> bytes:
    """Return samples by prompt as bytes, those of the lowest prompts as far as there is room; empty where none are."""
    encoded, size_bytes = dict[int, msgspec.Raw](), 0
    for number in sorted(samples):
        text = msgspec.msgpack.encode(tuple(samples[number]))
        size_bytes += len(text)
        if size_bytes > MOST_BYTES:
            log.warning("samples of %d prompts under way are not kept: too many", len(samples) - len(encoded))
            break
        encoded[number] = msgspec.Raw(text)
    return zstandard.ZstdCompressor().compress(msgspec.msgpack.encode(encoded)) if encoded else b""


def unpack(data: bytes | memoryview, samples_per_prompt: int, max_tokens: int) -> dict[int, Samples]:
    """Return what `pack` was given, but for prompts whose samples do not fit this run; nothing of what is damaged."""
    if not memoryview(data).nbytes:
        return {}
    try:
        if zstandard.frame_content_size(data) > 2 * MOST_BYTES:
            raise ValueError("more than anybody keeps")
        found = _decoder.decode(zstandard.ZstdDecompressor().decompress(data))
    except (zstandard.ZstdError, msgspec.MsgspecError, ValueError) as error:
        log.warning("the samples that were under way cannot be read, they are drawn again: %s", error)
        return {}
    return {
        number: samples
        for number, samples in found.items()
        if len(samples) == samples_per_prompt and all(_fits(sample, max_tokens) for sample in samples)
    }


def oldest_version(samples: Sequence[wire.Sample]) -> int | None:
    """Return the oldest weight version of any token; None where there is no token."""
    return min((span.version for sample in samples for span in sample.versions), default=None)


def _fits(sample: wire.Sample, max_tokens: int) -> bool:
    count = len(sample.tokens)
    spans = [(span.start, span.end) for span in sample.versions]
    ends = [0, *(end for _, end in spans)]
    follow = all(start == before < end for (start, end), before in zip(spans, ends, strict=False))
    return count == len(sample.logprobs) == ends[-1] and count <= max_tokens and follow
