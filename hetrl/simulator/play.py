"""The play of a plan: groups of samples, batches and weight versions as they come about (`hetrl.simulator`)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hetrl.cost.iteration import SYNCS
from hetrl.cost.memory import task_footprints
from hetrl.cost.model import CostModel
from hetrl.cost.weight_sync import trained_models
from hetrl.plan.plan import Plan
from hetrl.simulator.batches import Batch, batch_of
from hetrl.simulator.events import Clock, Process, Signal, Turn
from hetrl.simulator.noise import Noise
from hetrl.simulator.pipelines import Setting, inference, scoring, training
from hetrl.simulator.rollouts import Generation, PromptDraw
from hetrl.simulator.steady import MOST_ITERATIONS, Versions
from hetrl.simulator.trace import Recorder, Span
from hetrl.simulator.weights import WeightSync
from hetrl.simulator.wires import Network
from hetrl.workload import (
    ACTOR_GENERATION,
    ACTOR_TRAINING,
    CRITIC_INFERENCE,
    CRITIC_TRAINING,
    INFERENCES,
    OLD_LOGPROBS,
    TRAININGS,
    scores_beside_inferences,
)


@dataclass(frozen=True)
class Simulated:
    """What a simulation showed; seconds are means over the iterations that count (`hetrl.simulator.steady`).

    `tasks` has the seconds in which each task ran (generation: its busiest replica) and those of the weight syncs;
    `wan_gb` what crossed each link in an iteration; `trained` the numbers of the prompts of each iteration, `dropped`
    how many groups were too old to train on.
    """

    iteration_seconds: float
    iterations: int
    steady: bool
    tasks: Mapping[str, float]
    wan_gb: Mapping[str, float]
    trained: tuple[tuple[int, ...], ...]
    dropped: int
    spans: tuple[Span, ...]


def _done() -> Signal:
    """Return a signal that has fired."""
    signal = Signal()
    signal.fire()
    return signal


class Play:
    """One play of a plan, over once `over` fires; `simulate` says what it is of."""

    def __init__(self, plan: Plan, model: CostModel, seed: int, iterations: int | None, noise: float) -> None:
        workload = model.workload
        self.plan, self.iterations = plan, iterations
        clock, recorder = Clock(), Recorder()
        network = Network(model.topology, clock, recorder)
        self.setting = Setting(model, clock, network, recorder, Noise(noise, f"noise/{seed}"))
        self.staleness = workload.max_staleness if workload.mode == "async" else 0
        self.batch = workload.samples // workload.samples_per_prompt
        self.version = self.next = self.dropped = 0
        self.since: dict[int, int] = {}  # the version of each running group
        self.waiting: dict[int, PromptDraw] = {}
        self.trained: list[tuple[int, ...]] = []
        self.seconds: defaultdict[str, list[float]] = defaultdict(list)
        self.versions, self.steady = Versions(1 + self.staleness), False
        self.changed, self.over = Signal(), Signal()
        self.turns = {name: turn for group in plan.groups for turn in [Turn()] for name in group.tasks}
        sharing = {name: group.tasks for group in plan.groups for name in group.tasks}
        shares = len(sharing[ACTOR_GENERATION]) > 1
        self.beside = scores_beside_inferences(workload.scores_batch, self.staleness, sharing[ACTOR_TRAINING])
        self.generation = Generation(self.setting, plan.tasks[ACTOR_GENERATION], shares, seed, self._complete)
        self.weights = {name: WeightSync(self.setting, plan, name) for name in trained_models(plan.tasks)}
        self.valued = [_done()]  # [n]: the critic that n batches have trained is where its inference is
        self.left: Mapping[Turn, Signal] = {
            turn: _done() for turn in self.turns.values()
        }  # by each group, the last batch
        self._note_version()
        if shares:
            clock.start(self._hold_turn())
        clock.start(self._batches())

    # --- groups of samples ---

    def _admit(self) -> None:
        accepted = len(self.trained) * self.batch + len(self.waiting)
        allowed = (self.staleness + self.version + 1) * self.batch - accepted - len(self.since)
        fresh = [self.generation.group(self.next + index, self.version) for index in range(allowed)]
        self.next += len(fresh)
        self.since |= {group.number: group.version for group in fresh}
        if fresh:
            self.generation.start(fresh, self.batch)

    def _complete(self, group: PromptDraw) -> None:
        del self.since[group.number]
        self.waiting[group.number] = group
        self.changed.fire()

    def _batches(self) -> Process:
        """Form a batch once there are enough groups and the last one leaves room; send it on its way.

        It waits for the groups that the next batch may not take (`hetrl.runtime.rl.feed`).
        """
        sent, served = _done(), _done()
        self._admit()
        while True:
            self._sweep()
            while len(self.waiting) < self.batch or len(self.trained) - self.staleness in self.since.values():
                self.changed = Signal()
                yield self.changed
                self._sweep()
            numbers = sorted(self.waiting)[: self.batch]
            groups = [self.waiting.pop(number) for number in numbers]
            self.trained.append(tuple(numbers))
            lengths = [length for group in groups for length in group.lengths]
            before, sent, room = (sent, served), Signal(), Signal()
            served = self.setting.clock.start(self._iteration(self._batch_of(lengths), before, sent, room))
            yield room

    def _sweep(self) -> None:
        stale = [n for n, group in self.waiting.items() if len(self.trained) - group.version > self.staleness]
        for number in stale:
            del self.waiting[number]
        self.dropped += len(stale)
        if stale:
            self._admit()

    # --- one iteration ---

    def _batch_of(self, lengths: Sequence[int]) -> Batch:
        """Let every group do the tasks of a batch after those of the batch before."""
        batch = batch_of(len(self.valued) - 1, lengths, self.left, self.turns)
        self.left = batch.left
        self.valued.append(Signal())
        return batch

    def _iteration(self, batch: Batch, before: tuple[Signal, Signal], sent: Signal, room: Signal) -> Process:
        """Train a batch and serve a version; `before`: the last version was sent, was served.

        There is `room` for the next batch once this one has passed its first station.
        """
        inferences = [self._start(name, batch) for name in INFERENCES if name in self.plan.tasks]
        actor = self._start(ACTOR_TRAINING, batch) if self.beside else None
        yield from inferences
        if inferences:
            room.fire()
        batch.ready.fire()
        actor = actor or self._start(ACTOR_TRAINING, batch)
        self.setting.clock.start(self._train_critic(batch))
        yield actor
        room.fire()
        yield before[0]
        began = self.setting.clock.now
        yield from self.weights["actor"].transfer()
        sent.fire()
        yield before[1]
        yield from self.generation.load(self.weights["actor"].load_seconds())
        self.seconds[SYNCS["actor"]].append(self.setting.clock.now - began)
        self.version += 1
        self._serve()
        self._admit()

    def _train_critic(self, batch: Batch) -> Process:
        """Train the critic, if there is one, and bring its weights to its inference, one version after another."""
        if "critic" in self.weights:
            critic = self.weights["critic"]
            yield self._start(CRITIC_TRAINING, batch)
            yield self.valued[batch.number]
            began = self.setting.clock.now
            yield from critic.transfer()
            yield self.setting.noise.perturbed(max(critic.load_seconds()))
            self.seconds[SYNCS["critic"]].append(self.setting.clock.now - began)
        self.valued[batch.number + 1].fire()

    def _start(self, name: str, batch: Batch) -> Signal:
        """Let a task run in its group's turn; the signal fires when it has run, before it leaves its devices."""
        ran = Signal()
        self.setting.clock.start(self._task(name, batch, ran))
        return ran

    def _task(self, name: str, batch: Batch, ran: Signal) -> Process:
        turn = self.turns[name]
        yield batch.after[turn]
        if name == CRITIC_INFERENCE:
            yield self.valued[max(batch.number - self.staleness, 0)]
        if name in TRAININGS:
            yield batch.inferred[turn]
        if name == CRITIC_TRAINING and self.setting.model.workload.kl_in_reward:
            yield batch.scored
        yield turn.take()
        yield from self._switch(name, "reload")
        yield from self._work(name, batch)
        ran.fire()
        yield from self._switch(name, "offload")
        turn.give()
        batch.leave(name, turn)

    def _work(self, name: str, batch: Batch) -> Process:
        """Run a task on its devices; a training that scores the batch has them until the others are done with it."""
        task, clock, scored = self.plan.tasks[name], self.setting.clock, 0.0
        began = clock.now
        if name in INFERENCES:
            yield from inference(self.setting, name, task, batch.lengths)
        else:
            if name == ACTOR_TRAINING and self.setting.model.workload.scores_batch:
                yield from scoring(self.setting, task, batch.lengths)
                scored = clock.now - began
                self.seconds[OLD_LOGPROBS].append(scored)
                batch.scored.fire()
            yield batch.ready
            began = clock.now
            yield from training(self.setting, name, task, batch.lengths)
        self.seconds[name].append(scored + clock.now - began)

    def _switch(self, name: str, what: str) -> Process:
        """Move an offloaded task's state over PCIe, one way."""
        model, task, slowest = self.setting.model, self.plan.tasks[name], 0.0
        if task.idle_state != "offload":
            return
        for device, needs in task_footprints(name, task, model):
            found = model.topology.device_by_id[device]
            seconds = needs.host_gb * 1e9 / model.rates(device).host_bytes_per_s
            self.setting.recorder.on_devices((found,), what, name, self.setting.clock.now, seconds)
            slowest = max(slowest, seconds)
        yield self.setting.noise.perturbed(slowest)

    def _hold_turn(self) -> Process:
        """Generate in the group's turn whenever no other task of the group wants it."""
        turn = self.turns[ACTOR_GENERATION]
        while True:
            yield from self.generation.until_needed()
            yield turn.take(later=True)
            yield from self._switch(ACTOR_GENERATION, "reload")
            self.generation.resume()
            yield turn.wanted
            yield from self.generation.stop()
            yield from self._switch(ACTOR_GENERATION, "offload")
            turn.give()

    # --- what it showed ---

    def _note_version(self) -> None:
        self.versions.times.append(self.setting.clock.now)
        self.versions.busy.append([rollout.busy_seconds for rollout in self.generation.rollouts])
        self.versions.late.append(self.version + 1 - sum(signal.done for signal in self.valued))

    def _serve(self) -> None:
        self._note_version()
        done = self.versions.done
        if self.iterations is None:
            self.steady = self.versions.is_steady(builds_up=self.staleness > 0)
            enough = self.steady or done >= MOST_ITERATIONS
        else:
            enough = done >= self.iterations
        if enough:
            self.over.fire()

    def result(self) -> Simulated:
        """Return what the play has shown."""
        versions = self.versions
        recent = {name: seconds[-versions.counted :] for name, seconds in self.seconds.items()}
        tasks = {name: sum(seconds) / len(seconds) for name, seconds in recent.items()}
        # As predicted: with the fixed time of a call, in which no replica works yet.
        tasks[ACTOR_GENERATION] = self.generation.call_seconds + versions.busiest_seconds
        done = versions.done
        return Simulated(
            iteration_seconds=versions.iteration_seconds,
            iterations=done,
            steady=self.steady,
            tasks=tasks,
            wan_gb={f"{a}-{b}": size / 1e9 / done for (a, b), size in sorted(self.setting.network.carried.items())},
            trained=tuple(self.trained[:done]),
            dropped=self.dropped,
            spans=self.setting.recorder.spans(),
        )
