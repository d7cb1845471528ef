"""Generation replicas on a virtual clock: continuous batching of samples whose lengths only the clock knows.

All running sequences of a replica gain a token every a + c x their number seconds (the cost model's decode step). What
a replica lacks of a sample's context when it begins a stretch (prompt, tokens of other replicas) is prefilled, while
the others wait.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from hetrl.dispatch import Begun, Key
from hetrl.questions.serving import generation
from hetrl.workload import Architecture

TICK_SECONDS = 1.0
_DONE = 1e-6  # of a token


@dataclass(frozen=True)
class Kind:
    """How a replica of one GPU runs a model: sequences at once, a and c of a step, the prefill of one token."""

    gpu: str
    sequences: int
    fixed: float
    rise: float
    prefill: float

    def step(self, running: float) -> float:
        """Return the seconds in which each of the running sequences gains a token."""
        return self.fixed + self.rise * running

    def rate(self, running: int) -> float:
        """Return the tokens per second of so many sequences."""
        return running / self.step(running)


def kind_of(gpu: str, model: Architecture, prompt: int, response: int) -> Kind:
    """Return what the cost model says of one GPU for prompts and responses of these lengths."""
    many, one = (generation(model, gpu, batch=n, prompt=prompt, response=response).details for n in (4096, 1))
    running = int(many["running_sequences"])
    rise = (many["step_seconds"] - one["step_seconds"]) / max(1, running - 1)
    prefill = generation(model, gpu, batch=1, prompt=prompt, response=1).breakdown["prefill"] / prompt
    return Kind(gpu, running, one["step_seconds"] - rise, rise, prefill)


class Policy(Protocol):
    """Who draws what, when; the replica and the sample of what begins, or is given up."""

    def next(self, now: float) -> Sequence[Begun]:
        """Return what begins now."""

    def late(self, now: float) -> Sequence[Begun]:
        """Return what begins a second time, asked every `TICK_SECONDS`."""

    def advanced(self, name: str, key: Key, tokens: int, seconds: float, *, complete: bool) -> Sequence[Begun]:
        """Hear of a stretch; return what is given up."""


@dataclass
class _Replica:
    kind: Kind
    left: dict[Key, float] = field(default_factory=dict)  # tokens of the stretches under way
    since: dict[Key, float] = field(default_factory=dict)
    prompts: set[int] = field(default_factory=set)  # whose keys and values it has
    stall: float = 0.0  # seconds of prefill to come

    def until_next(self) -> float:
        """Return the seconds to the next stretch that ends."""
        return self.stall + min(self.left.values()) * self.kind.step(len(self.left)) if self.left else float("inf")

    def advance(self, seconds: float) -> list[Key]:
        """Let time pass; return the stretches that end."""
        waited = min(self.stall, seconds)
        self.stall -= waited
        tokens = (seconds - waited) / self.kind.step(len(self.left))
        self.left = {key: left - tokens for key, left in self.left.items()}
        return [key for key, left in self.left.items() if left < _DONE]


class Play:
    """One batch under a policy; `stretch` bounds what is drawn at a time."""

    def __init__(
        self, policy: Policy, fleet: Mapping[str, Kind], lengths: Mapping[Key, int], prompt_tokens: int, stretch: int
    ) -> None:
        self._policy, self._lengths, self._prompt_tokens, self._stretch = policy, lengths, prompt_tokens, stretch
        self._replicas = {name: _Replica(kind) for name, kind in fleet.items()}
        self._lacks, self._at = dict(lengths), dict[Key, str]()
        self._now = 0.0

    def seconds(self) -> float:
        """Return when every sample is complete."""
        tick = TICK_SECONDS
        self._begin(self._policy.next(self._now))
        while self._lacks:
            seconds = min(tick - self._now, *(one.until_next() for one in self._replicas.values()))
            self._now += seconds
            for name, key in [(n, key) for n, one in self._replicas.items() for key in one.advance(seconds)]:
                self._end(name, key)
            self._begin(self._policy.next(self._now))
            if self._now >= tick - 1e-9:
                tick += TICK_SECONDS
                self._begin(self._policy.late(self._now))
        return self._now

    def _begin(self, begun: Sequence[Begun]) -> None:
        for name, key in begun:
            replica = self._replicas[name]
            replica.left[key], replica.since[key] = float(min(self._stretch, self._lacks[key])), self._now
            assert len(replica.left) <= replica.kind.sequences
            lacking = 0 if key[0] in replica.prompts else self._prompt_tokens
            if self._at.get(key) != name:
                lacking += self._lengths[key] - self._lacks[key]
            replica.stall += replica.kind.prefill * lacking
            replica.prompts.add(key[0])
            self._at[key] = name

    def _end(self, name: str, key: Key) -> None:
        replica = self._replicas[name]
        if replica.left.pop(key, None) is None:  # given up in this very moment
            return
        tokens = min(self._stretch, self._lacks[key])
        self._lacks[key] -= tokens
        complete = not self._lacks[key]
        if complete:
            del self._lacks[key]
        seconds = self._now - replica.since.pop(key)
        for other, same in self._policy.advanced(name, key, tokens, seconds, complete=complete):
            del self._replicas[other].left[same]
