"""Discrete-event execution of a plan: what an iteration takes when every micro-batch, chunk and transfer is played.

    admit:    groups start while (max_staleness + version + 1) x batch - (trained + waiting + running) > 0
    generate: replicas draw samples as the dispatch says, chunk by chunk                 (`rollouts`)
    batch:    once a batch of groups waits and the last batch has left its first station: the oldest not too old
              the inferences, each in its group's turn, and beside them the actor's trainer scores it, if it does
              (`workload.scores_beside_inferences`); then the trainings, the critic's    (`pipelines`)
              behind that scoring only where a KL penalty is taken off the rewards
              once the actor is trained its weights travel and are loaded, and a version more is served (`weights`)
              the critic's likewise, in mode sync behind the actor's where they share a wire

A group takes all tasks of a batch before those of the next one (`hetrl.cost.cycle`).

A synchronous plan is one with max_staleness 0: nothing can start before the version that it waits for. Seconds of a
decode step, of a pass over a stage and bytes of a transfer come from `hetrl.cost`; when things happen, and how they
wait for each other, from the play alone. Source of the admission rule: AReaL (arXiv 2505.24298), section 5.1.
"""

from __future__ import annotations

from hetrl.cost.model import CostModel
from hetrl.plan.plan import Plan
from hetrl.simulator.play import Play, Simulated
from hetrl.simulator.trace import Span, chrome_trace

__all__ = ["Simulated", "Span", "chrome_trace", "simulate"]


def simulate(
    plan: Plan, model: CostModel, seed: int = 0, iterations: int | None = None, noise: float = 0.0
) -> Simulated:
    """Play a plan until its iterations are steady, or for so many `iterations`; the same seed gives the same play.

    With `noise` what engines take, and response lengths, are off by at most this share, as those of emulated engines.
    """
    play = Play(plan, model, seed, iterations, noise)
    play.setting.clock.run(until=play.over)
    return play.result()
