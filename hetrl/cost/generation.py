"""Seconds of generation under continuous batching (vLLM), and the KV cache that bounds the batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from hetrl.cost import formulas
from hetrl.cost.batch_profile import batch_profile
from hetrl.cost.compute import StageShape, decode_seconds, prompt_seconds
from hetrl.cost.memory import held_sequences
from hetrl.cost.model import CostModel
from hetrl.cost.network import all_reduce_seconds
from hetrl.cost.stages import Placed, place_all
from hetrl.cost.training import Cost, activation_bytes
from hetrl.hardware import Path
from hetrl.lengths import Lengths
from hetrl.plan.plan import Replica, TaskPlan
from hetrl.workload import ACTOR_GENERATION, Workload

Server = tuple[tuple[StageShape, Path | None, Path | None], ...]  # per stage: shape, tensor-parallel path, hop


def server_of(placed: Sequence[Placed]) -> Server:
    """Return what the formulas need of a rollout replica."""
    return tuple((stage.shape, stage.peers, stage.hop) for stage in placed)


def step_seconds(server: Server, batch: float, context: float) -> float:
    """Return the time in which each of `batch` running sequences gains one token.

    With p stages the batch is p groups in flight and every stage reads its weights again for each of them:
    max(sum of stages + hops, p x slowest stage). Two all-reduces per layer join the tensor-parallel ranks, each with a
    fixed time of its own; a stage has one, too, and another for each sequence of a group.
    """
    part = batch / len(server)
    latency, slowest = 0.0, 0.0
    for shape, peers, hop in server:
        activation = activation_bytes(shape, part)
        stage = decode_seconds(shape, part, context)
        stage += fixed_seconds(shape, part) + decode_exchange_seconds(shape, activation, peers)
        latency += stage + (hop.seconds(activation) if hop else 0.0)
        slowest = max(slowest, stage)
    return max(latency, len(server) * slowest)


def fixed_seconds(shape: StageShape, batch: float) -> float:
    """Return what a decode step of so many sequences takes on a stage whatever the model."""
    return shape.rates.overhead.decode_step + batch * shape.rates.overhead.decode_sequence


def decode_exchange_seconds(shape: StageShape, activation: float, peers: Path | None) -> float:
    """Return what the all-reduces of a decode step take on a stage, two per layer of so many bytes."""
    if peers is None:
        return 0.0
    reduce = all_reduce_seconds(shape.tensor_parallel, activation, peers)
    return 2 * shape.layers * (reduce + shape.rates.overhead.decode_all_reduce)


def prompts_seconds(server: Server, prompts: float, prompt_tokens: float) -> float:
    """Return the time to prefill so many prompts: the slowest stage's rate, each prompt once.

    The samples of one prompt share its keys and values (vLLM's automatic prefix caching, on by default).
    """
    times = []
    for shape, peers, _ in server:
        tokens = prompts * prompt_tokens
        reduce = all_reduce_seconds(shape.tensor_parallel, activation_bytes(shape, tokens), peers)
        times.append(prompt_seconds(shape, tokens, prompt_tokens, prompts) + 2 * shape.layers * reduce)
    return max(times)


class ReplicaSeconds(NamedTuple):
    """One replica with its samples of an iteration, `whole`: from the call to the last token, alone on the replica.

    In asynchronous mode also: `busy`, how long it works per iteration at the steady rate; what the last sample takes
    where nothing is decoded beside it, `alone`, and what the samples of each iteration that are decoded beside it
    (those of its own among them) add to that, `shared`, and by waiting for the last of them to make room, `queued`;
    `refill`, what a stop costs that empties the cache; `renewal`, the same of a version, where it does.
    """

    whole: float
    busy: float
    alone: float = 0.0
    shared: float = 0.0
    queued: float = 0.0
    refill: float = 0.0
    renewal: float = 0.0


@dataclass
class _Share:
    """The samples that a replica draws of an iteration's `total`, at most `limit` at a time.

    A step is linear in batch x context, so the mean over all tokens may stand for every context: prompt + E[L^2] /
    (2 E[L]). The prompts are those of the samples that are dealt to the replica (`dealt_prompts`).
    """

    server: Server
    samples: int
    limit: float
    prompt_tokens: int
    samples_per_prompt: int
    response: Lengths
    total: int

    def __post_init__(self) -> None:
        # At once, not when first asked for: a search makes hundreds of thousands of shares.
        self.age = self.response.second_moment / (2 * self.response.mean)  # tokens of a running sample, over all tokens
        self.context = self.prompt_tokens + self.age  # of a token, on average
        self.prompts = dealt_prompts(self.samples, self.samples_per_prompt)  # that the samples are of
        self.prefill = prompts_seconds(self.server, self.prompts, self.prompt_tokens)
        self.before = self.server[0][0].rates.overhead.generation_call + self.prefill  # ahead of the first step

    @property
    def longer(self) -> float:
        """Return how many tokens the longest of all samples has more than the longest of these."""
        return self.response.longest_of(self.total) - self.response.longest_of(self.samples)

    def step(self, batch: float) -> float:
        """Return the seconds of a step of so many sequences."""
        return step_seconds(self.server, batch, self.context)

    def decoding(self, count: int) -> float:
        """Return the seconds of decoding so many samples, those of one step after the other."""
        return sum(n * self.step(b) for n, b in batch_profile(self.response, count, self.limit))


@lru_cache(maxsize=200_000)
def replica_seconds(
    server: Server,
    samples: int,
    limit: float,
    prompt_tokens: int,
    samples_per_prompt: int,
    response: Lengths,
    staleness: int,
    total: int,
    renews: bool = False,
) -> ReplicaSeconds:
    """Return the times of one replica that generates `samples` of `total` samples, at most `limit` at a time.

    whole = call + prefill + sum over the batch's profile of steps x step(batch)             (`batch_profile`)
            + (longest of the total - longest of the samples) x step(1): the slowest replica has the longest of all

    With a `staleness` above 0 generation runs ahead of trainings (`_seconds_ahead`).
    """
    share = _Share(server, samples, limit, prompt_tokens, samples_per_prompt, response, total)
    decoding = share.decoding(samples)
    once = decoding + share.longer * share.step(1.0)
    if staleness == 0:
        return ReplicaSeconds(share.before + once, share.prefill + once)
    return _seconds_ahead(share, decoding, once, staleness, renews)


def _seconds_ahead(share: _Share, decoding: float, once: float, staleness: int, renews: bool) -> ReplicaSeconds:
    """Return the times of a replica of which (1 + s) batches may be under way.

    Alone its samples decode in `decoding`, and with the longest of all samples among them in `once`.

    busy    = prefill + least of: (1 + s) batches at once, / (1 + s); samples x mean length x step(b) / b
              b = min(limit, (s + 1/2) x samples x mean length / longest of a prompt), s the staleness
    alone   = call + prefill + steps x a      with step(b) = a + c b, and steps those of `whole`: then samples of
    shared  = samples x mean length x c       one iteration add c x (all their tokens), of two twice as much
    queued  = what the samples of two iterations at once take longer than those of one and shared
    refill  = prefill of the prompts of b running samples and of what they have of their responses: nothing where all
              are of one length, which run in waves, for a stop comes when a batch has ended
    renewal = as of a refill, if a version `renews` contexts: it comes at any time

    b: the rule of admission lets (1 + s) batches be under way, of which half a batch waits for the rest of its batch,
    and complete samples for the last one of their prompt.
    """
    server, samples, limit, response = share.server, share.samples, share.limit, share.response
    longest = response.longest_of(share.samples_per_prompt)
    admitted = max((staleness + 0.5) * samples * response.mean / longest, 1.0)
    running = min(limit, admitted)
    ahead = share.decoding((1 + staleness) * samples)
    twice = ahead if staleness == 1 else share.decoding(2 * samples)
    busy = share.prefill + min(ahead / (1 + staleness), samples * response.mean * share.step(running) / running)
    steps = sum(n for n, _ in batch_profile(response, samples, limit)) + share.longer
    fixed, rise = _linear_step(server, share.context, min(limit, (1 + staleness) * samples * response.mean / steps))
    alone, shared = share.before + steps * fixed, samples * response.mean * rise
    queued = max(twice - decoding - shared, 0.0)
    held = share.prompt_tokens * share.prompts / samples * longest / response.mean + share.age  # tokens per sample
    renewal = prompts_seconds(server, running, held)
    refill = renewal if response.deviation else prompts_seconds(server, running, held - share.age)
    return ReplicaSeconds(share.before + once, busy, alone, shared, queued, refill, renewal if renews else 0.0)


def dealt_prompts(samples: int, samples_per_prompt: int) -> float:
    """Return of how many prompts a replica draws so many samples, on average over where it begins in a row of them."""
    return (samples + samples_per_prompt - math.gcd(samples, samples_per_prompt)) / samples_per_prompt


def _linear_step(server: Server, context: float, batch: float) -> tuple[float, float]:
    """Return a and c of step(b) = a + c b, through 1 and a larger batch."""
    one, most = step_seconds(server, 1.0, context), max(batch, 2.0)
    rise = (step_seconds(server, most, context) - one) / (most - 1)
    return one - rise, rise


def batch_limit(server: Server, replica: Replica, workload: Workload) -> int:
    """Return how many sequences run at once: what the KV cache holds at mean length, at most `max_sequences`.

    At least one: a replica with less room would not start.
    """
    held = held_sequences(replica.kv_cache_gb, (shape for shape, _, _ in server), workload)
    return max(min(held, replica.max_sequences), 1)


def generation_seconds(replicas: Sequence[tuple[int, ReplicaSeconds]]) -> ReplicaSeconds:
    """Return the times of all replicas, each with its samples, together: those of the slowest, the longest refills.

    Together they are `busy` at the sum of their rates: a replica that is ahead is given the next prompts.
    """
    slowest = max((one for _, one in replicas), key=lambda one: one.whole)
    busy = formulas.steady_seconds([samples for samples, _ in replicas], [one.busy for _, one in replicas])
    refill, renewal = (max(getattr(one, name) for _, one in replicas) for name in ("refill", "renewal"))
    return slowest._replace(busy=busy, refill=refill, renewal=renewal)


def generation_cost(task: TaskPlan, model: CostModel) -> Cost:
    """Return the seconds of generating one iteration's samples: of the slowest replica, or at the steady rate."""
    workload, times = model.workload, []
    shape = (workload.prompt_tokens, workload.samples_per_prompt, workload.response)
    placed = place_all(ACTOR_GENERATION, task.replicas, model)
    for replica, stages in zip(task.replicas, placed, strict=True):
        server = server_of(stages)
        limit = batch_limit(server, replica, workload)
        load = (replica.samples, limit, *shape, workload.staleness, workload.samples)
        alone = replica_seconds(server, *load, workload.renews_contexts)
        times.append((replica.samples, alone))
    found = generation_seconds(times)
    return Cost(found.busy if workload.staleness else found.whole, {}, found._asdict())
