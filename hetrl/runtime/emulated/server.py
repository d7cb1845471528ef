"""An emulated rollout server: continuous batching of samples whose lengths are drawn, at the cost model's rates.

    as long as it is not held:
        take waiting samples while there is room; fill the cache with the prompts that it does not hold
        decode until the shortest sample is complete, or something changes, at most `STRETCH_STEPS` steps
        answer what is complete

A response is one token again and again, so that a server sees how long it is when it goes on with what another one
began, and then the token that ends it. Where a token of a text counts as several, the engine counts those.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hetrl.cost.generation import Server, prompts_seconds, step_seconds
from hetrl.errors import HetrlError
from hetrl.lengths import Lengths
from hetrl.runtime import wire
from hetrl.runtime.emulated.pace import Pace
from hetrl.simulator.noise import STRETCH_STEPS

KEPT_PROMPTS = 4096  # that a server knows to be in its cache
LOGPROB = -1.0
_TOKEN_DONE = 1e-6
_TRIES = 1000  # to draw a length beyond the tokens that are there


@dataclass(frozen=True)
class Replica:
    """What a server is: stages, sequences at once, seconds to load a version, lengths of responses, their token.

    A token of a text counts as `tokens_each`.
    """

    stages: Server
    limit: int
    load_seconds: float
    response: Lengths
    filler: int
    tokens_each: int = 1


@dataclass(eq=False)
class _Sequence:
    left: float  # tokens to go
    context: float  # tokens in the cache
    prompt: tuple[int, ...]
    count: int  # of tokens of the text
    done: asyncio.Future[None]
    drawn: float = 0.0
    versions: list[tuple[float, int]] = field(default_factory=list)  # tokens drawn when each version began


class EmulatedServer:
    """Draws samples as a vLLM server does; `run` is its engine, which goes on beside the calls."""

    def __init__(self, replica: Replica, pace: Pace) -> None:
        self._replica, self._pace = replica, pace
        self._running: list[_Sequence] = []
        self._waiting: deque[_Sequence] = deque()
        self._cached: dict[int, None] = {}  # prompts, in the order of their last use
        self._changed, self._at_rest = asyncio.Event(), asyncio.Event()
        self._held = self._refill = False
        self._open = 0.0  # from when on requests are taken
        self._version = 0
        self._has_weights = False
        self._updating = asyncio.Lock()

    @property
    def versions(self) -> dict[str, str]:
        """Return the engine and its version."""
        return {"rollouts": "emulated"}

    @property
    def ended(self) -> bool:
        """Return False: it goes with its process."""
        return False

    async def generate(
        self, prompt: Sequence[int], sampling: wire.Sampling, timeout_seconds: float, since: int | None = None
    ) -> tuple[wire.Sample, ...]:
        """Return continuations of a prompt of token ids; HetrlError before the first weights arrived."""
        if not self._has_weights:
            raise HetrlError("asked to generate before the first weight version arrived")
        await self._called()
        drawn = (self._draw(tuple(prompt), sampling) for _ in range(sampling.samples))
        async with asyncio.timeout(timeout_seconds):
            return tuple(await asyncio.gather(*drawn))

    async def _called(self) -> None:
        """Wait as long as a server takes to begin: the fixed time of a call, for all requests that come meanwhile.

        What comes while it draws has its tokens read and its place found beside that.
        """
        if not (self._running or self._waiting) and self._pace.now >= self._open:
            call = self._replica.stages[0][0].rates.overhead.generation_call
            self._open = self._pace.now + self._pace.perturbed(call)
        await self._pace.until(self._open)

    async def _draw(self, prompt: tuple[int, ...], sampling: wire.Sampling) -> wire.Sample:
        (length, shorter), each = self._length(prompt), self._replica.tokens_each
        to_go = math.ceil(length / each)
        count = min(to_go, sampling.max_tokens)
        left, context = float(min(length, count * each)), float(len(prompt) * each)
        one = _Sequence(left, context, prompt, count, asyncio.get_running_loop().create_future())
        self._waiting.append(one)
        self._changed.set()
        try:
            await one.done
        except asyncio.CancelledError:
            self._waiting = deque(other for other in self._waiting if other is not one)
            self._running = [other for other in self._running if other is not one]
            raise
        ends = to_go < sampling.max_tokens + shorter  # with the last token that is asked for, too, unless it must
        stops = sampling.stop_tokens if ends else ()
        tokens = (self._replica.filler,) * (count - len(stops[:1])) + stops[:1]
        return wire.Sample(
            tokens=tokens,
            logprobs=(LOGPROB,) * count,
            versions=_spans(one, each),
            finish_reason="stop" if stops else "length",
        )

    def _length(self, prompt: tuple[int, ...]) -> tuple[int, bool]:
        """Return how many tokens follow what there is of a response, and whether it could be longer.

        Its length is drawn given that it is longer than that.
        """
        fillers = 0
        while fillers < len(prompt) and prompt[-1 - fillers] == self._replica.filler:
            fillers += 1
        have, response = fillers * self._replica.tokens_each, self._replica.response
        for _ in range(_TRIES):
            (length,) = response.draw(1, self._pace.random)
            length = self._pace.length(length, response.maximum)
            if length > have:
                return length - have, length < response.maximum
        return max(response.maximum - have, 1), False

    # ---- weights, and turns of other tasks

    async def update_weights(self, version: int, path: Path, timeout_seconds: float, *, recompute: bool = True) -> None:
        """Hold all sequences while a version is loaded; with `recompute` their contexts are computed anew."""
        async with self._updating:
            await self.pause(forget=recompute)
            try:
                await self.load_weights(version, path, timeout_seconds)
            finally:
                self.resume()

    async def load_weights(self, version: int, path: Path, timeout_seconds: float) -> None:
        """Wait as long as it takes to load a version, and serve it; the file is not read: its digest was proven."""
        await self._pace.until(self._pace.now + self._pace.perturbed(self._replica.load_seconds))
        self._version, self._has_weights = version, True
        for one in self._running:
            one.versions.append((one.drawn, version))

    async def pause(self, *, forget: bool = True) -> None:
        """Hold all sequences where they are; with `forget` keys and values are dropped."""
        self._held = True
        self._refill |= forget
        if forget:
            self._cached.clear()
        self._changed.set()
        await self._at_rest.wait()

    def resume(self) -> None:
        """Let them go on."""
        self._held = False
        self._changed.set()

    # ---- the engine

    async def run(self) -> None:
        """Generate whatever comes, until it is cancelled."""
        at = self._pace.now  # until when everything is done
        while True:
            if self._held or not (self._running or self._waiting):
                await self._rest()
                at = self._pace.now
                continue
            self._at_rest.clear()
            at = await self._fill(at)
            at = await self._decode(at)

    async def _rest(self) -> None:
        self._at_rest.set()
        await self._changed.wait()
        self._changed.clear()

    async def _fill(self, at: float) -> float:
        """Take what waits and compute the keys and values that the cache lacks; return when that is done."""
        tokens, prompts, stages = 0.0, 0, self._replica.stages
        if self._refill:
            self._refill = False
            held = {one.prompt: None for one in self._running}
            prompts, drawn = len(self._running), sum(one.drawn for one in self._running)
            tokens = drawn + sum(map(len, held)) * self._replica.tokens_each
            for prompt in held:
                self._remember(prompt)
        while self._waiting and len(self._running) < self._replica.limit:
            one = self._waiting.popleft()
            if not self._remember(one.prompt):
                prompts, tokens = prompts + 1, tokens + len(one.prompt) * self._replica.tokens_each
            one.versions.append((0.0, self._version))
            self._running.append(one)
        if not prompts:
            return at
        done = at + self._pace.perturbed(prompts_seconds(stages, prompts, tokens / prompts))
        await self._pace.until(done)
        return done

    def _remember(self, prompt: tuple[int, ...]) -> bool:
        """Keep a prompt in the cache; return whether it was there."""
        key = hash(prompt)
        known = key in self._cached
        self._cached.pop(key, None)
        self._cached[key] = None
        if len(self._cached) > KEPT_PROMPTS:
            del self._cached[next(iter(self._cached))]
        return known

    async def _decode(self, at: float) -> float:
        """Let all running sequences gain tokens; return until when they have."""
        if not self._running:  # given up meanwhile
            return at
        batch, steps = len(self._running), min(*(one.left for one in self._running), STRETCH_STEPS)
        context = sum(one.context for one in self._running) / batch + steps / 2  # halfway through
        seconds = self._pace.perturbed(steps * step_seconds(self._replica.stages, batch, context))
        await self._until_changed(at + seconds)
        passed = min(max(self._pace.now - at, 0.0), seconds)
        gained = steps * passed / seconds
        for one in self._running:
            one.left -= gained
            one.drawn += gained
            one.context += gained
        complete = [one for one in self._running if one.left < _TOKEN_DONE]
        self._running = [one for one in self._running if one.left >= _TOKEN_DONE]
        for one in complete:
            self._remember((*one.prompt, *(self._replica.filler,) * one.count))
            if not one.done.done():
                one.done.set_result(None)
        return at + passed

    async def _until_changed(self, moment: float) -> None:
        """Wait for a moment, or until sequences are held or another one could begin."""
        while not self._held and not (self._waiting and len(self._running) < self._replica.limit):
            if (seconds := self._pace.to_wait(moment)) <= 0:
                return
            self._changed.clear()
            try:
                async with asyncio.timeout(seconds):
                    await self._changed.wait()
            except TimeoutError:
                return


def _spans(one: _Sequence, tokens_each: int) -> tuple[wire.VersionSpan, ...]:
    """Return which tokens of a sample were drawn under which version."""
    starts = [min(round(drawn / tokens_each), one.count) for drawn, _ in one.versions]
    ends = [*starts[1:], one.count]
    named = zip((version for _, version in one.versions), starts, ends, strict=True)
    return tuple(wire.VersionSpan(version, start, end) for version, start, end in named if end > start)


class EmulatedIdle:
    """Holds an emulated server while other tasks have its devices; the way over PCIe takes `switch_seconds`."""

    def __init__(self, server: EmulatedServer, pace: Pace, switch_seconds: float) -> None:
        self._server, self._pace, self._switch_seconds = server, pace, switch_seconds
        self._state = "resident"
        self.asleep = False

    async def sleep(self, idle_state: str, *, keep_weights: bool) -> bool:
        """Hold the server; return whether it still has its weights."""
        self.asleep, self._state = True, idle_state
        await self._server.pause(forget=idle_state != "resident")
        await self._switch()
        return keep_weights or idle_state != "offload"

    async def wake(self, load: Callable[[], Awaitable[None]]) -> None:
        """Let the server go on, once it has the weights that it lacks."""
        await self._switch()
        self.asleep = False
        await load()
        self._server.resume()

    async def _switch(self) -> None:
        if self._state == "offload":
            await self._pace.until(self._pace.now + self._pace.perturbed(self._switch_seconds))
