"""How long what an emulated engine is asked for takes, and what crosses links meanwhile.

A pass over a batch and a version of the weights are played event by event (`hetrl.simulator`), with the lengths that
the batch really has: micro-batches through their pipeline, reductions over their wires. Nothing else is under way in
such a play, but for versions beside each other, so that what else uses a link at the same time does not slow it down.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from hetrl.cost import iteration
from hetrl.cost.model import CostModel
from hetrl.plan.plan import Plan, TaskPlan
from hetrl.simulator.events import Clock, Process
from hetrl.simulator.pipelines import Setting, deal, inference, training
from hetrl.simulator.trace import Recorder
from hetrl.simulator.weights import WeightSync
from hetrl.simulator.wires import Network


@dataclass(frozen=True)
class Played:
    """Seconds, the bytes that crossed each link (from site, to site), and the most micro-batches of a replica."""

    seconds: float
    carried: Mapping[tuple[str, str], float]
    micro_batches: int = 1


OfBatch = Callable[[str, TaskPlan, Sequence[int], CostModel], Played]


def scores(name: str, task: TaskPlan, lengths: Sequence[int], model: CostModel) -> Played:
    """Return what one forward pass of a world over sequences of these lengths takes."""
    return _dealt(lambda setting: inference(setting, name, task, _responses(lengths, model)), task, lengths, model)


def optimizer_step(name: str, task: TaskPlan, lengths: Sequence[int], model: CostModel) -> Played:
    """Return what one optimiser step on sequences of these lengths takes."""
    once = replace(  # of a batch that was scored before, where that is needed
        model.workload, optimizer_steps_per_iteration=1, epochs=1, kl_in_reward=False, ratio_to_sampler=True
    )
    alone = replace(model, workload=once)
    return _dealt(lambda setting: training(setting, name, task, _responses(lengths, model)), task, lengths, alone)


def versions(plan: Plan, leave: Sequence[tuple[str, float]], model: CostModel) -> list[float]:
    """Return when versions of trained models, each of which leaves at a second of its own, are where they are used.

    What goes ahead of others does so here, what shares links shares them.
    """
    setting = _setting(model)
    arrive = [0.0] * len(leave)

    def travel(number: int, trained: str, second: float) -> Process:
        yield second
        yield from WeightSync(setting, plan, trained).transfer()
        arrive[number] = setting.clock.now

    for ended in [setting.clock.start(travel(number, *one)) for number, one in enumerate(leave)]:
        setting.clock.run(until=ended)
    return arrive


def load_seconds(plan: Plan, trained: str, model: CostModel) -> list[float]:
    """Return the pause of each replica that loads a version of a trained model."""
    return WeightSync(_setting(model), plan, trained).load_seconds()


def switch_seconds(name: str, task: TaskPlan, model: CostModel) -> float:
    """Return how long a task's state is under way over PCIe, one way, where its idle state is offload."""
    return iteration.switch_seconds(name, task, model) / 2


def _setting(model: CostModel) -> Setting:
    clock, recorder = Clock(), Recorder()
    return Setting(model, clock, Network(model.topology, clock, recorder), recorder)


def _played(model: CostModel, process: Callable[[Setting], Process]) -> Played:
    setting = _setting(model)
    setting.clock.run(until=setting.clock.start(process(setting)))
    return Played(setting.clock.now, dict(setting.network.carried))


def _dealt(process: Callable[[Setting], Process], task: TaskPlan, lengths: Sequence[int], model: CostModel) -> Played:
    """Return what a pass over a batch takes, which is dealt to the task's replicas in micro-batches."""
    dealt = deal(_responses(lengths, model), task, model.workload.prompt_tokens)
    return replace(_played(model, process), micro_batches=max(map(len, dealt)))


def _responses(lengths: Sequence[int], model: CostModel) -> list[int]:
    """Return what follows the prompts, all of which count as planned."""
    return [length - model.workload.prompt_tokens for length in lengths]
