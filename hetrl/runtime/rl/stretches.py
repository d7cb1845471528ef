"""A sample and the stretches that it is drawn in: what is asked for, what came, and how they are put together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from msgspec.structs import replace

from hetrl.errors import HetrlError
from hetrl.runtime import wire

NOTHING = wire.Sample(tokens=(), logprobs=(), versions=(), finish_reason="length")
BEFORE = "before"  # in the place of a replica: who drew it before this run went on


@dataclass(frozen=True, kw_only=True)
class Request:
    """One sample that is wanted: a continuation of `prompt` of at most `max_tokens`; `seed` is of the tokens so far.

    It may `have` some, drawn before.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    temperature: float
    stop_tokens: tuple[int, ...]
    seed: Callable[[int], int]
    doing: str
    have: wire.Sample = NOTHING


@dataclass(frozen=True)
class Stretch:
    """A part of a sample: who drew it, how many tokens, when it was asked for and was here, on this process's clock."""

    replica: str
    tokens: int
    sent: float
    back: float


@dataclass(frozen=True)
class Drawn:
    """A sample and its stretches."""

    sample: wire.Sample
    stretches: tuple[Stretch, ...]


def stretch_of(answer: wire.Message, most: int, who: str) -> tuple[wire.Sample, float]:
    """Return the stretch that an answer holds, of at most so many tokens, and the seconds that it took.

    Raises HetrlError for anything else: a stretch that is empty or too long, has not a log-prob per token, or says that
    it ended for its length where it is shorter.
    """
    if not isinstance(answer, wire.Generated) or len(answer.samples) != 1:
        raise HetrlError(f"{who}: answered {type(answer).__name__}, not with one sample")
    (part,) = answer.samples
    count = len(part.tokens)
    if not 0 < count <= most or len(part.logprobs) != count:
        raise HetrlError(f"{who}: {count} tokens with {len(part.logprobs)} log-probs came, asked for at most {most}")
    if part.finish_reason != "stop" and (part.finish_reason, count) != ("length", most):
        raise HetrlError(f"{who}: ended for {part.finish_reason} after {count} of {most} tokens")
    if sum(span.end - span.start for span in part.versions) != count:
        raise HetrlError(f"{who}: not each of {count} tokens has a weight version")
    return part, answer.seconds


def joined(first: wire.Sample, then: wire.Sample) -> wire.Sample:
    """Return a sample that goes on."""
    have = len(first.tokens)
    spans = [wire.VersionSpan(span.version, have + span.start, have + span.end) for span in then.versions]
    versions = [*first.versions]
    if versions and spans and versions[-1].version == spans[0].version:
        spans[0] = wire.VersionSpan(spans[0].version, versions.pop().start, spans[0].end)
    return replace(
        then,
        tokens=(*first.tokens, *then.tokens),
        logprobs=(*first.logprobs, *then.logprobs),
        versions=(*versions, *spans),
    )
