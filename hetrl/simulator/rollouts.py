"""Generation by replicas with continuous batching: chunks of decode steps over samples of drawn lengths.

    a replica, again and again:
        loads a version that has arrived
        takes waiting samples while it has room, and fills the cache with the prompts that nobody before them had
        decodes: as many steps as the shortest of its samples lacks, at most `CHUNK_TOKENS`
        hands over the samples that are complete

A group is the samples of one prompt; its lengths come from the seed and its number, whoever draws it.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hetrl.cost.generation import Server, batch_limit, prompts_seconds, server_of, step_seconds
from hetrl.cost.stages import place_all
from hetrl.hardware import Device
from hetrl.plan.plan import TaskPlan
from hetrl.simulator.events import Process, Signal
from hetrl.simulator.pipelines import Setting
from hetrl.workload import ACTOR_GENERATION

CHUNK_TOKENS = 16  # fewer events than token by token; what arrives waits for the end of the chunk


@dataclass(eq=False)
class PromptDraw:
    """The samples of one prompt: response lengths, the weight version at their start, how many are not complete."""

    number: int
    lengths: tuple[int, ...]
    version: int
    open: int
    prefilled: bool = False


@dataclass(eq=False)
class _Sample:
    group: PromptDraw
    left: int  # tokens to go
    context: int  # tokens in the cache


@dataclass(eq=False)
class Rollout:
    """One rollout replica; `complete` is called with each group whose last sample is done.

    `weight` is its part of the groups that are dispatched; `loses_cache` whether a stop costs the keys and values of
    running samples, which are then computed again.
    """

    setting: Setting
    devices: tuple[Device, ...]
    server: Server
    limit: int
    weight: int
    loses_cache: bool
    complete: Callable[[PromptDraw], None]
    stopped: bool = False
    groups: int = 0  # not complete
    busy_seconds: float = 0.0
    running: list[_Sample] = field(default_factory=list)
    waiting: deque[_Sample] = field(default_factory=deque)
    _wake: Signal = field(default_factory=Signal)
    _at_rest: Signal = field(default_factory=Signal)
    _load: tuple[float, Signal] | None = None

    def add(self, group: PromptDraw) -> None:
        """Send a group here; its samples arrive after the fixed time of a call."""
        self.groups += 1

        def arrive() -> None:
            self.waiting.extend(_Sample(group, length, 0) for length in group.lengths)
            self._wake.fire()

        self.setting.clock.after(self.server[0][0].rates.overhead.generation_call, arrive)

    def load(self, seconds: float) -> Signal:
        """Load a version between two decode steps, once it is awake; the signal fires when the version serves."""
        served = Signal()
        self._load = (seconds, served)
        self._wake.fire()
        return served

    @property
    def has_work(self) -> bool:
        """Return whether there is a group to complete or a version to load."""
        return self.groups > 0 or self._load is not None

    def stop(self) -> Signal:
        """Come to rest after the chunk under way; the signal fires then."""
        self.stopped, self._at_rest = True, Signal()
        self._wake.fire()
        return self._at_rest

    def resume(self) -> None:
        """Go on."""
        self.stopped = False
        self._wake.fire()

    def run(self) -> Process:
        """Generate whatever comes, for ever."""
        while True:
            if self.stopped:
                self._at_rest.fire()
                yield from self._until_woken()
                if not self.stopped and self.loses_cache:
                    yield from self._fill_again()
            elif self._load is not None:
                (seconds, served), self._load = self._load, None
                yield from self._work("load weights", seconds)
                served.fire()
            elif self.running or self.waiting:
                began = self.setting.clock.now
                yield from self._chunk()
                self.busy_seconds += self.setting.clock.now - began
            else:
                yield from self._until_woken()

    def _until_woken(self) -> Process:
        self._wake = Signal()
        yield self._wake
        yield 0.0  # what arrives at the same time is there, too

    def _work(self, what: str, seconds: float) -> Process:
        self.setting.recorder.on_devices(self.devices, what, ACTOR_GENERATION, self.setting.clock.now, seconds)
        yield seconds

    def _chunk(self) -> Process:
        prompt_tokens, fresh = self.setting.model.workload.prompt_tokens, 0
        while self.waiting and len(self.running) < self.limit:
            sample = self.waiting.popleft()
            fresh += not sample.group.prefilled
            sample.group.prefilled, sample.context = True, prompt_tokens
            self.running.append(sample)
        if fresh:
            yield from self._work(f"prefill {fresh}", prompts_seconds(self.server, fresh, prompt_tokens))
        batch = len(self.running)
        steps = min(min(sample.left for sample in self.running), CHUNK_TOKENS)
        context = sum(sample.context for sample in self.running) / batch + steps / 2  # halfway through the chunk
        yield from self._work(f"decode {batch}", steps * step_seconds(self.server, batch, context))
        for sample in self.running:
            sample.left -= steps
            sample.context += steps
        done = [sample.group for sample in self.running if not sample.left]
        self.running = [sample for sample in self.running if sample.left]
        for group in done:
            group.open -= 1
            if not group.open:
                self.groups -= 1
                self.complete(group)

    def _fill_again(self) -> Process:
        """Compute the keys and values of running samples again: each prompt once, each response so far."""
        prompt_tokens = self.setting.model.workload.prompt_tokens
        held = {sample.group: None for sample in self.running}
        for sample in self.waiting:
            sample.group.prefilled = sample.group in held
        if not self.running:
            return
        tokens = len(held) * prompt_tokens + sum(sample.context - prompt_tokens for sample in self.running)
        count = len(self.running)
        yield from self._work(f"prefill {count} again", prompts_seconds(self.server, count, tokens / count))


class Generation:
    """All rollout replicas."""

    def __init__(
        self, setting: Setting, task: TaskPlan, shares_devices: bool, seed: int, complete: Callable[[PromptDraw], None]
    ) -> None:
        """Start the replicas; those that share their devices with other tasks are stopped at first."""
        self._setting, self._task, self._seed = setting, task, seed
        self._needed = Signal()
        self.rollouts = []
        placed = place_all(ACTOR_GENERATION, task.replicas, setting.model)
        for replica, stages in zip(task.replicas, placed, strict=True):
            devices = tuple(device for stage in stages for device in stage.devices)
            limit = batch_limit(server_of(stages), replica, setting.model.workload)
            loses = shares_devices and task.idle_state != "resident"
            rollout = Rollout(setting, devices, server_of(stages), limit, replica.samples, loses, complete)
            rollout.stopped = shares_devices
            setting.clock.start(rollout.run())
            self.rollouts.append(rollout)

    def group(self, number: int, version: int) -> PromptDraw:
        """Return the group of a prompt with its drawn lengths."""
        workload = self._setting.model.workload
        lengths = workload.response.draw(workload.samples_per_prompt, random.Random(f"{self._seed}/{number}"))
        return PromptDraw(number, lengths, version, open=len(lengths))

    def deal(self, groups: Sequence[PromptDraw]) -> None:
        """Send the groups of one iteration to the replicas as the plan divides them."""
        start = 0
        for rollout in self.rollouts:
            count = rollout.weight // self._setting.model.workload.samples_per_prompt
            for group in groups[start : start + count]:
                rollout.add(group)
            start += count
        self._needed.fire()

    def dispatch(self, group: PromptDraw) -> None:
        """Send a group where it finds the least work for the replica's weight."""
        able = [rollout for rollout in self.rollouts if rollout.weight]
        min(able, key=lambda rollout: (rollout.groups + 1) / rollout.weight).add(group)
        self._needed.fire()

    def until_needed(self) -> Process:
        """Wait until any replica has work."""
        if not any(rollout.has_work for rollout in self.rollouts):
            self._needed = Signal()
            yield self._needed

    def stop(self) -> Process:
        """Bring all replicas to rest."""
        yield from [rollout.stop() for rollout in self.rollouts]

    def resume(self) -> None:
        """Let all replicas go on."""
        for rollout in self.rollouts:
            rollout.resume()

    def load(self, seconds: Sequence[float]) -> Process:
        """Let all replicas load a version, each in its seconds."""
        served = [rollout.load(pause) for rollout, pause in zip(self.rollouts, seconds, strict=True)]
        self._needed.fire()
        yield from served
