"""Generation by replicas with continuous batching: chunks of decode steps over samples of drawn lengths.

    the dispatch of the runtime (`hetrl.dispatch`) says which replica draws which stretch of which sample next
    a replica, again and again:
        loads a version that has arrived, and fills the cache with the contexts of what is under way, if it renews them:
        once where a stop has emptied it, too
        takes the stretches that it was given, and fills the cache with what it lacks of their prompts and samples
        decodes: as many steps as the shortest of its stretches lacks, at most `CHUNK_TOKENS`
        hands over the stretches that are complete

A group is the samples of one prompt; its lengths come from the seed and its number, whoever draws it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hetrl.cost.generation import Server, batch_limit, prompts_seconds, server_of, step_seconds
from hetrl.cost.stages import place_all
from hetrl.dispatch import STRETCH_TOKENS, Capacity, Dispatch, Key
from hetrl.hardware import Device
from hetrl.plan.plan import TaskPlan
from hetrl.simulator.events import Process, Signal
from hetrl.simulator.noise import Rate
from hetrl.simulator.pipelines import Setting
from hetrl.stopwatch import Stopwatch
from hetrl.workload import ACTOR_GENERATION

CHUNK_TOKENS = 16  # fewer events than token by token; what arrives waits for the end of the chunk


@dataclass(eq=False)
class PromptDraw:
    """The samples of one prompt: response lengths, the weight version at their start, how many are not complete."""

    number: int
    lengths: tuple[int, ...]
    version: int
    open: int


@dataclass(eq=False)
class _Sample:
    """A sample that is not complete; `left` of its stretch under way, which began at `since`; `at` who drew it last."""

    group: PromptDraw
    key: Key
    lacks: int  # tokens
    has: int = 0  # tokens of its response
    left: int = 0
    since: float = 0.0
    at: Rollout | None = None


@dataclass(eq=False)
class Rollout:
    """One rollout replica; `hand_over` is called with each sample whose stretch is done.

    `loses_cache`: whether a stop costs the keys and values of running samples, which are then computed again.
    """

    setting: Setting
    devices: tuple[Device, ...]
    server: Server
    loses_cache: bool
    hand_over: Callable[[Rollout, _Sample], None]
    stopped: bool = False
    busy_seconds: float = 0.0
    running: list[_Sample] = field(default_factory=list)
    waiting: list[_Sample] = field(default_factory=list)
    prompts: set[int] = field(default_factory=set)  # whose keys and values it holds
    _wake: Signal = field(default_factory=Signal)
    _at_rest: Signal = field(default_factory=Signal)
    _load: tuple[float, Signal] | None = None
    _rate: Rate = field(init=False)

    def __post_init__(self) -> None:
        """Decode at the rates of the cost model, as far off as the setting says."""
        self._rate = Rate(self.setting.noise)

    def begin(self, sample: _Sample, now: float) -> None:
        """Let it draw a stretch of a sample, from the next chunk on."""
        sample.left, sample.since = min(sample.lacks, STRETCH_TOKENS), now
        self.waiting.append(sample)
        self._wake.fire()

    def load(self, seconds: float) -> Signal:
        """Load a version between two decode steps, once it is awake; the signal fires when the version serves."""
        served = Signal()
        self._load = (seconds, served)
        self._wake.fire()
        return served

    @property
    def has_work(self) -> bool:
        """Return whether there is a stretch to draw or a version to load."""
        return bool(self.running or self.waiting) or self._load is not None

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
                    yield from self._catch_up(loses_cache=True)
            elif self._load is not None:
                yield from self._catch_up(loses_cache=self.setting.model.workload.renews_contexts)
            elif self.running or self.waiting:
                began = self.setting.clock.now
                yield from self._chunk()
                self.busy_seconds += self.setting.clock.now - began
            else:
                yield from self._until_woken()

    def _catch_up(self, loses_cache: bool) -> Process:
        """Load the version that has come, if one has, and fill the cache once, whatever has emptied it."""
        served = Signal()
        if self._load is not None:
            (seconds, served), self._load = self._load, None
            yield from self._work("load weights", self.setting.noise.perturbed(seconds))
        if loses_cache:
            yield from self._fill_again()
        served.fire()

    def _until_woken(self) -> Process:
        self._wake = Signal()
        yield self._wake
        yield 0.0  # what arrives at the same time is there, too

    def _work(self, what: str, seconds: float) -> Process:
        self.setting.recorder.on_devices(self.devices, what, ACTOR_GENERATION, self.setting.clock.now, seconds)
        yield seconds

    def _chunk(self) -> Process:
        yield from self._take()
        batch = len(self.running)
        steps = min(min(sample.left for sample in self.running), CHUNK_TOKENS)
        tokens = sum(sample.has for sample in self.running) / batch + steps / 2  # halfway through the chunk
        context = self.setting.model.workload.prompt_tokens + tokens
        seconds = self._rate.seconds(steps, batch, step_seconds(self.server, batch, context))
        yield from self._work(f"decode {batch}", seconds)
        for sample in self.running:
            sample.left -= steps
            sample.lacks -= steps
            sample.has += steps
        done = [sample for sample in self.running if not sample.left]
        self.running = [sample for sample in self.running if sample.left]
        for sample in done:
            self.hand_over(self, sample)

    def _take(self) -> Process:
        """Let the waiting stretches run, after what the cache lacks of them: a prompt, what others have drawn."""
        contexts = []
        for sample in self.waiting:
            if sample.group.number not in self.prompts:
                self.prompts.add(sample.group.number)
                contexts.append(self.setting.model.workload.prompt_tokens)
            if sample.at is not self and sample.has:
                contexts.append(sample.has)
            sample.at = self
        self.running += self.waiting
        self.waiting = []
        if count := len(contexts):
            seconds = prompts_seconds(self.server, count, sum(contexts) / count)
            yield from self._work(f"prefill {count}", self.setting.noise.perturbed(seconds))

    def _fill_again(self) -> Process:
        """Compute the keys and values of running samples again: each prompt once, each response so far."""
        self.prompts = {sample.group.number for sample in self.running}
        if not self.running:
            return
        tokens = len(self.prompts) * self.setting.model.workload.prompt_tokens
        tokens += sum(sample.has for sample in self.running)
        count = len(self.running)
        seconds = prompts_seconds(self.server, count, tokens / count)
        yield from self._work(f"prefill {count} again", self.setting.noise.perturbed(seconds))


class Generation:
    """All rollout replicas; `complete` is called with each group whose last sample is done."""

    def __init__(
        self, setting: Setting, task: TaskPlan, shares_devices: bool, seed: int, complete: Callable[[PromptDraw], None]
    ) -> None:
        """Start the replicas; those that share their devices with other tasks are stopped at first."""
        self._setting, self._seed, self._complete = setting, seed, complete
        self._needed = Signal()
        self._ran = Stopwatch(lambda: setting.clock.now)  # stands still while generation does
        if shares_devices:
            self._ran.stop()
        self._samples: dict[Key, _Sample] = {}
        self.rollouts: list[Rollout] = []
        self._names: dict[str, Rollout] = {}
        capacities: dict[str, Capacity] = {}
        workload = setting.model.workload
        placed = place_all(ACTOR_GENERATION, task.replicas, setting.model)
        loses = shares_devices and task.idle_state != "resident"
        for index, (replica, stages) in enumerate(zip(task.replicas, placed, strict=True)):
            devices = tuple(device for stage in stages for device in stage.devices)
            server = server_of(stages)
            rollout = Rollout(setting, devices, server, loses, self._advanced)
            rollout.stopped = shares_devices
            capacities[str(index)] = Capacity(batch_limit(server, replica, workload), replica.samples)
            self._names[str(index)] = rollout
            setting.clock.start(rollout.run())
            self.rollouts.append(rollout)
        self._name_of = {rollout: name for name, rollout in self._names.items()}
        self._dispatch = Dispatch(capacities, workload.response.maximum, STRETCH_TOKENS)
        self.call_seconds = max(one.server[0][0].rates.overhead.generation_call for one in self.rollouts)

    def group(self, number: int, version: int) -> PromptDraw:
        """Return the group of a prompt with its drawn lengths."""
        workload = self._setting.model.workload
        drawn = workload.response.draw(workload.samples_per_prompt, random.Random(f"{self._seed}/{number}"))
        lengths = tuple(self._setting.noise.length(one, workload.response.maximum) for one in drawn)
        return PromptDraw(number, lengths, version, open=len(lengths))

    def start(self, groups: Sequence[PromptDraw], batch: int) -> None:
        """Let groups be drawn, those of a lower batch first, after the fixed time of a call."""

        def arrive() -> None:
            for group in groups:
                keys = [(group.number, index) for index in range(len(group.lengths))]
                self._samples |= {key: _Sample(group, key, group.lengths[key[1]]) for key in keys}
                self._dispatch.add(group.number, group.number // batch, len(keys))
            self._go_on()
            self._needed.fire()

        self._setting.clock.after(self.call_seconds, arrive)

    def _go_on(self) -> None:
        for name, key in self._dispatch.next(self._ran.seconds):
            self._names[name].begin(self._samples[key], self._ran.seconds)

    def _advanced(self, rollout: Rollout, sample: _Sample) -> None:
        seconds, complete = self._ran.seconds - sample.since, not sample.lacks
        tokens = (sample.has - 1) % STRETCH_TOKENS + 1
        self._dispatch.advanced(self._name_of[rollout], sample.key, tokens, seconds, complete=complete)
        if complete:
            del self._samples[sample.key]
            sample.group.open -= 1
            if not sample.group.open:
                self._complete(sample.group)
        self._go_on()

    def until_needed(self) -> Process:
        """Wait until any replica has work."""
        if not any(rollout.has_work for rollout in self.rollouts):
            self._needed = Signal()
            yield self._needed

    def stop(self) -> Process:
        """Bring all replicas to rest."""
        yield from [rollout.stop() for rollout in self.rollouts]
        self._ran.stop()

    def resume(self) -> None:
        """Let all replicas go on."""
        self._ran.go_on()
        for rollout in self.rollouts:
            rollout.resume()

    def load(self, seconds: Sequence[float]) -> Process:
        """Let all replicas load a version, each in its seconds."""
        served = [rollout.load(pause) for rollout, pause in zip(self.rollouts, seconds, strict=True)]
        self._needed.fire()
        yield from served
