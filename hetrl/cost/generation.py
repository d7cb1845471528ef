"""Seconds of generation under continuous batching (vLLM), and the KV cache that bounds the batch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from hetrl.cost.compute import StageShape, decode_seconds, prefill_seconds
from hetrl.cost.efficiency import rates
from hetrl.cost.memory import kv_cache_gb
from hetrl.cost.network import all_reduce_seconds
from hetrl.cost.stages import Placed, place_all
from hetrl.cost.training import Cost, activation_bytes
from hetrl.hardware import Path, Topology
from hetrl.plan import TaskPlan
from hetrl.workload import ACTOR_GENERATION, Lengths, Workload

Server = tuple[tuple[StageShape, Path | None, Path | None], ...]  # per stage: shape, tensor-parallel path, hop


def server_of(placed: Sequence[Placed]) -> Server:
    """Return what the formulas need of a rollout replica."""
    return tuple((stage.shape, stage.peers, stage.hop) for stage in placed)


def step_seconds(server: Server, batch: float, context: float, fixed: float | None = None) -> float:
    """Return the time in which each of `batch` running sequences gains one token.

    With p stages the batch is p groups in flight and every stage reads its weights again for each of them:
    max(sum of stages + hops, p x slowest stage). Two all-reduces per layer join the tensor-parallel ranks. `fixed` is
    the time that a step takes beside them, that of the planned engine unless it is given.
    """
    part = batch / len(server)
    latency, slowest = 0.0, 0.0
    for shape, peers, hop in server:
        activation = activation_bytes(shape, part)
        stage = decode_seconds(shape, part, context)
        stage += rates(shape.gpu).overhead.decode_step if fixed is None else fixed
        stage += 2 * shape.layers * all_reduce_seconds(shape.tensor_parallel, activation, peers)
        latency += stage + (hop.seconds(activation) if hop else 0.0)
        slowest = max(slowest, stage)
    return max(latency, len(server) * slowest)


def prompts_seconds(server: Server, prompts: float, prompt_tokens: float) -> float:
    """Return the time to prefill so many prompts: the slowest stage's rate, each prompt once.

    The samples of one prompt share its keys and values (vLLM's automatic prefix caching, on by default).
    """
    times = []
    for shape, peers, _ in server:
        tokens = prompts * prompt_tokens
        reduce = all_reduce_seconds(shape.tensor_parallel, activation_bytes(shape, tokens), peers)
        times.append(prefill_seconds(shape, tokens, prompt_tokens, prompts) + 2 * shape.layers * reduce)
    return max(times)


@lru_cache(maxsize=200_000)
def replica_seconds(
    server: Server,
    samples: float,
    max_batch: float,
    prompt_tokens: int,
    samples_per_prompt: int,
    response: Lengths,
    steady: bool,
) -> float:
    """Return the time in which one replica generates `samples` samples, at most `max_batch` at a time.

    Synchronous: max(total work / steady rate, longest sample); the longest sample runs with the full batch for the mean
    length and nearly alone for the rest. `steady` (asynchronous): total work / steady rate, because unfinished
    samples carry over and the batch stays full. Context = prompt + half the response, the mean over positions.
    """
    batch = max(min(samples, max_batch), 1.0)
    context = prompt_tokens + response.mean / 2
    step = step_seconds(server, batch, context)
    prefill = prompts_seconds(server, samples / samples_per_prompt, prompt_tokens)
    work = samples / batch * response.mean * step
    call = rates(server[0][0].gpu).overhead.generation_call
    if steady:
        return call + prefill + work
    alone = step_seconds(server, 1.0, prompt_tokens + (response.mean + response.maximum) / 2)
    longest = response.mean * step + (response.maximum - response.mean) * alone
    return call + prefill + max(work, longest)


def batch_limit(server: Server, task: TaskPlan, workload: Workload) -> int:
    """Return how many sequences run at once: what the KV cache holds at full length, at most `max_sequences`.

    The stage with the least room decides. At least one: a replica with less room would not start.
    """
    tokens = min(kv_cache_gb(shape, task, workload) * 1e9 / shape.kv_bytes_per_token for shape, _, _ in server)
    return max(min(int(tokens / workload.sequence_tokens), task.max_sequences or workload.samples), 1)


def generation_cost(task: TaskPlan, topology: Topology, workload: Workload) -> Cost:
    """Return the seconds of generating one iteration's samples: the slowest replica."""
    seconds = 0.0
    steady = workload.mode == "async" and workload.max_staleness > 0
    placed = place_all(ACTOR_GENERATION, task.replicas, topology, workload)
    for replica, stages in zip(task.replicas, placed, strict=True):
        server = server_of(stages)
        limit = batch_limit(server, task, workload)
        shape = (workload.prompt_tokens, workload.samples_per_prompt, workload.response, steady)
        seconds = max(seconds, replica_seconds(server, replica.samples, limit, *shape))
    return Cost(seconds, {}, {"generation": seconds})
