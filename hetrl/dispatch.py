"""Which generation replica draws which sample next: samples wait together, and a replica with a free place takes one.

A sample is drawn in stretches of at most so many tokens, any of them at any replica. Of the oldest batch of which it
may take any, a replica takes
    the first sample of a prompt that nobody has begun: its length foretells the others'
    else the sample that is expected to lack most, where those whose keys and values it holds count `OWN` times; of
    those that lack as much one of a prompt that it has drawn from, whose keys and values it holds; if it holds none,
    of the prompt of which most samples are left to follow
but none that would end earlier if it waited for the fastest replica, no more of a batch than its part, and none that is
left for a replica with less to do that has a place in a moment (`hetrl.replicas`).

Expected is the mean of the prompt's samples that are complete, the longest that is allowed while none is; a sample that
is longer lacks half of what it has.

Sources: longest first, Graham (doi 10.1137/0117039); to whoever ends it first, Ibarra and Kim (doi
10.1145/322003.322011); prompts divided into samples and samples into stretches, lengths foretold by the samples of the
same prompt, Seer (arXiv 2511.14617); what hangs is drawn elsewhere, too, backup tasks of MapReduce (OSDI 2004, section
3.6).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

from hetrl.replicas import Begun, Capacity, Key, Replicas
from hetrl.waiting import Waiting, alike, longest

__all__ = ["STRETCH_TOKENS", "Begun", "Capacity", "Dispatch", "Key"]

STRETCH_TOKENS = 1024  # of a sample are drawn at one replica, then at any; part of what samples depend on
OWN = 2.0


@dataclass
class _Sample:
    tokens: int = 0  # that it has
    lacks: float = 0.0  # tokens, as expected
    at: str | None = None  # the replica that began its last stretch


@dataclass
class _Prompt:
    batch: int
    open: dict[int, _Sample]  # not complete
    fresh: list[int]  # that nobody has begun, the last one first
    paused: dict[int, None] = field(default_factory=dict)  # begun, and nobody draws them
    complete: int = 0
    tokens: int = 0  # of those that are complete


class Dispatch:
    """The waiting samples and the replicas; `now` is any one clock, in seconds."""

    def __init__(self, replicas: Mapping[str, Capacity], longest: int, stretch: int) -> None:
        """Dispatch samples of at most `longest` tokens to `replicas`, at most `stretch` tokens at a time."""
        self._replicas = Replicas(replicas, min(stretch, longest))
        self.stretch, self._longest = stretch, longest
        self._prompts: dict[int, _Prompt] = {}
        self._waiting = Waiting()  # of those that nobody draws, as `_line_up` says
        self._left = 0  # how many nobody draws
        self._drawers: dict[Key, list[str]] = {}  # who draws those that somebody does
        self._lacking = 0.0  # tokens that all open samples lack, as expected

    @property
    def replicas(self) -> tuple[str, ...]:
        """Return those that are not lost."""
        return tuple(self._replicas)

    def add(self, prompt: int, batch: int, samples: int) -> None:
        """Let the samples of a prompt wait; those of a lower batch go first."""
        numbers = range(samples)
        self._prompts[prompt] = _Prompt(batch, {number: _Sample() for number in numbers}, [*reversed(numbers)])
        self._left += samples
        self._expect(prompt)

    def has(self, key: Key, tokens: int, *, complete: bool) -> None:
        """Note what a sample has that nobody here has begun."""
        self._prompts[key[0]].fresh.remove(key[1])
        self._left -= 1
        self._add(key, tokens, complete=complete)

    def drop(self, prompt: int) -> list[Begun]:
        """Forget a prompt; return who draws of it in vain."""
        if prompt not in self._prompts:
            return []
        keys = [(prompt, number) for number in self._prompts[prompt].open]
        for key in keys:
            self._close(key)
        return [self._stop(name, key) for key in keys for name in [*self._drawers.get(key, ())]]

    def next(self, now: float) -> list[Begun]:
        """Return which replicas begin a stretch of which samples now, the one with the least to do first."""
        if not self._waiting or not any(one.free for one in self._replicas.values()):
            return []
        begun, soon, left = list[Begun](), self._replicas.due(now), self._left
        parts, most = self._replicas.parts(), self._replicas.most(self._lacking, now)
        able = [
            (one.load(soon[name]), order, name)
            for order, (name, one) in enumerate(self._replicas.items())
            if one.free or soon[name]
        ]
        heapify(able)
        while left and self._waiting and able:
            _, order, name = heappop(able)
            replica = self._replicas[name]
            if replica.free:
                key = self._take(name, parts[name], most[name])
                if key is None:  # nor would it take any of what is left later on
                    continue
                begun.append(self._begin(name, key, now))
            else:
                soon[name] -= 1
            left -= 1
            if replica.free or soon[name]:
                heappush(able, (replica.load(soon[name]), order, name))
        return begun

    def late(self, now: float) -> list[Begun]:
        """Return which replicas begin stretches that hang elsewhere, each drawn by two at most.

        Where one hangs, nothing else is begun until something comes from there; or one stretch alone, once all that
        hung was drawn elsewhere.
        """
        drawing, begun = self._replicas.drawing(), list[Begun]()
        late = [(name, key) for name, key in drawing if self._replicas[name].is_late(key, now, self.stretch)]
        for name, key in late:
            self._replicas[name].hangs(key)
        for key in [key for _, key in late if len(self._drawers[key]) == 1]:
            able = [name for name, one in self._replicas.items() if one.free and key not in one.under_way]
            if able:
                begun.append(self._begin(max(able, key=lambda name: self._replicas[name].speed), key, now))
        return begun

    def advanced(self, name: str, key: Key, tokens: int, seconds: float, *, complete: bool) -> list[Begun]:
        """Note a stretch of so many tokens, drawn in so many seconds; return who draws it in vain."""
        self._replicas.measure(name, key, tokens, seconds)
        self._stop(name, key)
        self._replicas[name].answers()
        self._add(key, tokens, complete=complete)
        return [self._stop(other, key) for other in [*self._drawers.get(key, ())]]

    def _add(self, key: Key, tokens: int, *, complete: bool) -> None:
        sample, prompt = self._sample(key), self._prompts[key[0]]
        sample.tokens += tokens
        if complete:
            prompt.complete, prompt.tokens = prompt.complete + 1, prompt.tokens + sample.tokens
            self._close(key)
        else:
            self._wait(key)
        self._expect(key[0])

    def pause(self, name: str) -> None:
        """Begin nothing at a replica, and count what it draws as late, until it may go on."""
        self._replicas[name].paused = True

    def resume(self, name: str) -> None:
        """Let a replica go on."""
        self._replicas[name].paused = False
        self._replicas[name].answers()

    def lost(self, name: str) -> list[Begun]:
        """Give a replica up: what nobody else draws of its samples waits again; return what it draws in vain."""
        in_vain = [self._stop(name, key) for key in [*self._replicas[name].under_way]]
        del self._replicas[name]
        for _, key in in_vain:
            if key not in self._drawers:
                self._wait(key)
                self._line_up(key[0])
        return in_vain

    def back(self, name: str) -> None:
        """Take a replica back that was lost; it has drawn nothing yet."""
        self._replicas.back(name)

    # ---- who takes what

    def _take(self, name: str, part: int, most: float) -> Key | None:
        """Return what a replica takes, of what lacks at most so much; of no batch run more than its `part` there."""
        replica = self._replicas[name]
        running = Counter(self._prompts[number].batch for number, _ in replica.under_way)
        for batch, line in self._waiting.lines():
            if running[batch] >= part:
                continue
            # What it holds nothing of comes in the order of the line; the others may count more for this replica.
            first = longest(line, most)
            if first is None:
                continue
            if not replica.prompts:
                return max(alike(line, first), key=lambda one: len(self._prompts[one[-1][0]].fresh))[-1]
            own = (one for one in self._waiting.of(replica.prompts, batch) if one[1] <= most)
            return max((first, *own), key=lambda one: (*self._worth(one[-1], name), one[-1]))[-1]
        return None

    def _line_up(self, number: int) -> None:
        """Let what waits of a prompt stand where it belongs: all that has begun, and one that has not."""
        prompt = self._prompts[number]
        keys = [(number, sample) for sample in (*prompt.paused, *prompt.fresh[-1:])]
        self._waiting.put(number, prompt.batch, [(*self._worth(key), key) for key in keys])

    def _worth(self, key: Key, name: str | None = None) -> tuple[bool, float, bool, int]:
        """Return what orders the choice of a replica: prompts that nobody has begun, then by what is lacking.

        Without one: of a replica that has drawn nothing of the prompt.
        """
        sample, prompt = self._sample(key), self._prompts[key[0]]
        unknown = not prompt.complete and len(prompt.fresh) == len(prompt.open)
        if name is None:
            return unknown, sample.lacks, False, -key[0]
        lacks = sample.lacks * (OWN if sample.at == name else 1.0)
        return unknown, lacks, key[0] in self._replicas[name].prompts, -key[0]

    def _begin(self, name: str, key: Key, now: float) -> Begun:
        self._unwait(key)
        self._line_up(key[0])
        self._sample(key).at = name
        self._replicas[name].begin(key, now)
        self._drawers.setdefault(key, []).append(name)
        return name, key

    def _wait(self, key: Key) -> None:
        """Let a sample wait that was begun."""
        self._prompts[key[0]].paused[key[1]] = None
        self._left += 1

    def _unwait(self, key: Key) -> None:
        """Let a sample wait no longer, if it does."""
        prompt, number = self._prompts[key[0]], key[1]
        if number in prompt.paused:
            del prompt.paused[number]
        elif number in prompt.fresh:
            prompt.fresh.remove(number)
        else:
            return
        self._left -= 1

    def _stop(self, name: str, key: Key) -> Begun:
        self._replicas[name].stop(key)
        self._drawers[key].remove(name)
        if not self._drawers[key]:
            del self._drawers[key]
        return name, key

    # ---- what is expected

    def _sample(self, key: Key) -> _Sample:
        return self._prompts[key[0]].open[key[1]]

    def _expect(self, number: int) -> None:
        """Note anew what the open samples of a prompt lack."""
        if (prompt := self._prompts.get(number)) is None:
            return
        length = prompt.tokens / prompt.complete if prompt.complete else self._longest
        for sample in prompt.open.values():
            lacks = min(self._longest - sample.tokens, max(length - sample.tokens, sample.tokens / 2))
            self._lacking += lacks - sample.lacks
            sample.lacks = lacks
        self._line_up(number)

    def _close(self, key: Key) -> None:
        """Forget a sample, and with the last one its prompt."""
        prompt = self._prompts[key[0]]
        sample = prompt.open.pop(key[1])
        self._lacking -= sample.lacks
        self._unwait(key)
        if not prompt.open:
            self._waiting.put(key[0], prompt.batch, ())
            del self._prompts[key[0]]
            for replica in self._replicas.values():
                replica.prompts.discard(key[0])
