"""Answers to single questions, without a plan: how fast, does it fit, what binds.

Every function takes names of the catalogue, numbers, and the efficiencies that count (the calibrated ones unless given)
and returns an `Answer`; the formulas are those of `hetrl.cost`.
Raises UsageError for names that the catalogue does not have and for numbers that cannot be.
"""

from __future__ import annotations

import math
from itertools import pairwise

from hetrl.cost.compute import (
    StageShape,
    decode_seconds,
    layer_activation_bytes,
    prefill_seconds,
    weight_seconds,
)
from hetrl.cost.efficiency import Efficiencies, Rates, calibrated
from hetrl.cost.generation import Server, decode_exchange_seconds, fixed_seconds, prompts_seconds, step_seconds
from hetrl.cost.memory import BATCHED_TOKENS, LOGIT_BYTES_FORWARD, inference_active_bytes
from hetrl.cost.network import all_reduce_seconds
from hetrl.cost.stages import Placed
from hetrl.cost.training import activation_bytes, forward_pass_seconds
from hetrl.errors import UsageError
from hetrl.gpus import gpu_type
from hetrl.hardware import Path
from hetrl.questions.answer import Answer, positive, sources
from hetrl.questions.step import NODE_GPUS, even_stages, one_site
from hetrl.workload import Architecture

CONTEXT = 880  # tokens per sequence where a layer's question names none: the mean of the Helix (ASPLOS'25) tables


def _check_serving(model: Architecture, gpu: str, tp: int, pp: int = 1) -> None:
    gpu_type(gpu)
    positive(tp=tp, pp=pp)
    if tp > NODE_GPUS:
        raise UsageError(f"--tp {tp}: tensor parallelism stays inside a node of {NODE_GPUS} GPUs; use --pp")
    if model.heads % tp:
        raise UsageError(f"--tp {tp} does not divide the {model.heads} attention heads of {model.name}")
    if pp > model.layers:
        raise UsageError(f"--pp {pp}: {model.name} has {model.layers} layers only")


def _peers(gpu: str, tp: int) -> Path | None:
    site = one_site(gpu, tp, NODE_GPUS)
    return site.path(site.devices[0], site.devices[1]) if tp > 1 else None


def _server(model: Architecture, gpu: str, rates: Rates, tp: int, pp: int) -> Server:
    site, peers = one_site(gpu, tp * pp, NODE_GPUS), _peers(gpu, tp)
    hops = [site.path(*ends) for ends in pairwise(site.devices[: tp * pp : tp])]
    stages = zip(even_stages(model, rates, tp, pp), [*hops, None], strict=True)
    return tuple((shape, peers, hop) for shape, hop in stages)


def generation(
    model: Architecture,
    gpu: str,
    tp: int = 1,
    pp: int = 1,
    batch: int = 1,
    prompt: int = 1,
    response: int = 1024,
    engine: str | None = None,
    efficiencies: Efficiencies | None = None,
) -> Answer:
    """Return the time from `batch` prompts of `prompt` tokens to the last of their `response` tokens each.

    `tokens` are output tokens. The first of them comes with the prefill. Context = prompt + half the response, which is
    exact, since a step is linear in its context. What the KV cache does not hold at once waits until those that run are
    done. `engine` is the release whose speed counts (`hetrl.cost.efficiency.Efficiencies.rates_served`).
    """
    _check_serving(model, gpu, tp, pp)
    positive(batch=batch, prompt=prompt, response=response)
    efficiencies = efficiencies or calibrated()
    rates = efficiencies.rates_served(gpu, engine)
    server = _server(model, gpu, rates, tp, pp)
    weights_gb, token_gb = _serving_gb(server, batch, prompt, response)
    room = int((rates.usable_gb - weights_gb) / (token_gb * (prompt + response)))
    running = max(min(batch, room), 1)
    context = prompt + response / 2
    rounds = {running: batch // running, batch % running: 1}  # how many of so many sequences: all end together
    breakdown: dict[str, float] = {}
    for together, count in rounds.items():
        for name, seconds in _step_breakdown(server, together, context, pp).items() if together else ():
            breakdown[name] = breakdown.get(name, 0.0) + count * (response - 1) * seconds
    breakdown["prefill"] = prompts_seconds(server, batch, prompt) + fixed_seconds(server[0][0], 0)
    return Answer(
        seconds=sum(breakdown.values()),
        tokens=float(batch * response),
        gpus=tp * pp,
        breakdown=breakdown,
        memory_gb=weights_gb + running * (prompt + response) * token_gb,
        usable_gb=rates.usable_gb,
        **sources(efficiencies, gpu, "decode", "prefill"),
        details={"running_sequences": running, "step_seconds": step_seconds(server, running, context)},
    )


def _serving_gb(server: Server, batch: int, prompt: int, response: int) -> tuple[float, float]:
    """Return what the fullest GPU needs before any key, and for the keys and values of one token."""
    tokens = min(BATCHED_TOKENS, batch * (prompt + response))
    before, per_token = 0.0, 0.0
    for shape, _, _ in server:
        logits = batch * shape.architecture.vocabulary * LOGIT_BYTES_FORWARD / shape.tensor_parallel
        need = shape.parameters * shape.weight_bytes + tokens * layer_activation_bytes(shape)
        before = max(before, need + (logits if shape.last else 0.0))
        per_token = max(per_token, shape.kv_bytes_per_token)
    return before / 1e9, per_token / 1e9


def _step_parts(server: Server, batch: float, context: float) -> dict[str, float]:
    parts = dict.fromkeys(("weights", "products", "keys and values", "communication"), 0.0)
    for shape, peers, hop in server:
        dense = decode_seconds(shape, batch, 0)
        moved = activation_bytes(shape, batch)
        # Where products and weights take as long, both together take 1.4 times that (`overlapped`).
        parts["weights" if dense < 1.5 * weight_seconds(shape) else "products"] += dense
        parts["keys and values"] += decode_seconds(shape, batch, context) - dense
        parts["communication"] += decode_exchange_seconds(shape, moved, peers)
        parts["communication"] += hop.seconds(moved) if hop else 0.0
    return {name: part for name, part in parts.items() if part > 0}


def _step_breakdown(server: Server, running: int, context: float, pp: int) -> dict[str, float]:
    """Return what a decode step of so many sequences takes; with a pipeline, waiting is shared out."""
    parts = _step_parts(server, running / pp, context)
    parts["step overhead"] = sum(fixed_seconds(shape, running / pp) for shape, _, _ in server)
    scale = step_seconds(server, running, context) / sum(parts.values())
    return {name: part * scale for name, part in parts.items()}


def decode_layer(
    model: Architecture,
    gpu: str,
    tp: int = 1,
    batch: int = 1,
    context: float = CONTEXT,
    efficiencies: Efficiencies | None = None,
) -> Answer:
    """Return the time of one layer in one decode step of `batch` sequences with `context` tokens each."""
    efficiencies = efficiencies or calibrated()
    shape = _layer(model, gpu, tp, context, efficiencies, batch=batch)
    parts = _step_parts(((shape, _peers(gpu, tp), None),), batch, context)
    held = shape.parameters * 2 + batch * context * shape.kv_bytes_per_token + batch * layer_activation_bytes(shape)
    basis = sources(efficiencies, gpu, "decode", "prefill")
    return Answer(sum(parts.values()), float(batch), tp, parts, held / 1e9, shape.rates.usable_gb, **basis)


def _layer(
    model: Architecture, gpu: str, tp: int, context: float, efficiencies: Efficiencies, **counts: int
) -> StageShape:
    """Return one layer on a rank; UsageError for a question that cannot be."""
    _check_serving(model, gpu, tp)
    positive(**counts)
    if not 0 <= context < math.inf:
        raise UsageError(f"--context must be a number of tokens, not {context:g}")
    return StageShape(model, 1, False, False, True, tp, efficiencies.rates(gpu))


def prefill_layer(
    model: Architecture,
    gpu: str,
    tp: int = 1,
    tokens: int = 1,
    sequence: float = CONTEXT,
    efficiencies: Efficiencies | None = None,
) -> Answer:
    """Return the time of one layer's forward pass over `tokens` tokens in sequences of `sequence`.

    A sequence of 0 leaves attention out: the linear operators alone.
    """
    efficiencies = efficiencies or calibrated()
    shape = _layer(model, gpu, tp, sequence, efficiencies, tokens=tokens)
    seconds = prefill_seconds(shape, tokens, min(sequence, tokens))
    reduce = 2 * all_reduce_seconds(tp, activation_bytes(shape, tokens), _peers(gpu, tp))
    memory_bound = weight_seconds(shape) > seconds / 1.5
    parts = {"weights" if memory_bound else "products": seconds, "communication": reduce}
    held = shape.parameters * 2 + tokens * (layer_activation_bytes(shape) + shape.kv_bytes_per_token)
    basis = sources(efficiencies, gpu, "prefill", "decode")
    return Answer(seconds + reduce, float(tokens), tp, parts, held / 1e9, shape.rates.usable_gb, **basis)


def inference(
    model: Architecture,
    gpu: str,
    tp: int = 1,
    pp: int = 1,
    samples: int = 1,
    sequence: int = 2048,
    micro_batch: int = 1,
    efficiencies: Efficiencies | None = None,
) -> Answer:
    """Return the time of one forward pass with log-probabilities over `samples` sequences of `sequence` tokens."""
    _check_serving(model, gpu, tp, pp)
    positive(samples=samples, sequence=sequence, micro_batch=micro_batch)
    efficiencies = efficiencies or calibrated()
    rates = efficiencies.rates(gpu)
    micro = min(micro_batch, samples) * sequence
    count = -(-samples // min(micro_batch, samples))
    filling, period, communication, memory = 0.0, 0.0, 0.0, 0.0
    for shape, peers, hop in _server(model, gpu, rates, tp, pp):
        moved = activation_bytes(shape, micro)
        forward = forward_pass_seconds(Placed(shape, (), peers, hop), micro, sequence)
        filling += forward + (hop.seconds(moved) if hop else 0.0)
        communication += 2 * shape.layers * all_reduce_seconds(tp, moved, peers) / pp
        period = max(period, forward)
        memory = max(memory, shape.parameters * 2 + inference_active_bytes(shape, micro))
    busy = count * (period - communication)
    parts = {"compute": busy, "communication": count * communication, "pipeline": filling - period}
    seconds = filling + (count - 1) * period
    return Answer(
        seconds=seconds,
        tokens=float(samples * sequence),
        gpus=tp * pp,
        breakdown={name: part for name, part in parts.items() if part > 1e-12},  # less is what rounding left
        memory_gb=memory / 1e9,
        usable_gb=rates.usable_gb,
        **sources(efficiencies, gpu, "training"),
    )
