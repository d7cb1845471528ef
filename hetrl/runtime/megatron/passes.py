"""Forward and backward passes over a batch: which sequences go together, and how megatron drives them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy
import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func
from numpy.typing import NDArray

from hetrl.dealing import micro_batches, over_replicas
from hetrl.runtime.megatron.batch import MicroBatch, TokenBatch, cut
from hetrl.runtime.megatron.layout import Layout
from hetrl.runtime.megatron.shards import to_rank_0
from hetrl.runtime.rl import losses

LossFunction = Callable[[MicroBatch, torch.Tensor], Any]
Parts = tuple[tuple[int, ...], ...]  # micro-batches, by index in the batch


def parts_of(batch: TokenBatch, layout: Layout) -> list[Parts]:
    """Return the micro-batches of every replica; all ranks find the same."""
    lengths = batch.lengths.tolist()
    shares = over_replicas(lengths, layout.samples)
    return [micro_batches(share, lengths, layout.micro_batch) for share in shares]


def drive(
    model: torch.nn.Module,
    batch: TokenBatch,
    parts: Parts,
    layout: Layout,
    device: torch.device,
    function: LossFunction,
    *,
    forward_only: bool,
) -> list[Any]:
    """Drive a replica's `parts` through its pipeline; the last stage gets what `function` reports of each.

    `function` takes a micro-batch and its hidden states [1, t, h].
    """
    micros = cut(batch, parts, device, multiple=layout.tensor, equal=layout.pipeline > 1)

    def forward_step(iterator: Iterator[MicroBatch], model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
        micro = next(iterator)
        hidden = model(micro.inputs, None, None, packed_seq_params=micro.packing)
        return hidden, partial(_report, function, micro)

    outputs: list[Any] = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(micros),
        model=[model],
        num_microbatches=len(micros),
        seq_length=micros[0].inputs.shape[1],
        micro_batch_size=1,
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
    )
    return outputs


def _report(function: LossFunction, micro: MicroBatch, hidden: torch.Tensor, non_loss_data: bool = False) -> Any:
    """Call `function` as megatron's schedule calls its loss function, with a flag that says what it already knows."""
    return function(micro, hidden)


def scores_on_rank_0(
    outputs: Sequence[torch.Tensor],
    batch: TokenBatch,
    parts: Sequence[Parts],
    layout: Layout,
    replica: int,
    device: torch.device,
) -> NDArray[numpy.float32]:
    """Return the scores of all replicas' `parts` in the order of the batch, float32 [n, s]; of use on rank 0 alone.

    `outputs` are those of this rank's `replica`, empty where it is not in the last stage (collective). Padding is 0.
    """
    scores = numpy.zeros(batch.tokens.shape, dtype=numpy.float32)
    width = int(batch.lengths.max())
    for other, part in enumerate(parts):
        if not (order := [index for micro in part for index in micro]):
            continue
        ours = None
        if outputs and other == replica:
            ours = torch.cat([torch.nn.functional.pad(rows, (0, width - rows.shape[1])) for rows in outputs])
        source = layout.rank_of(other, layout.pipeline - 1, 0)
        received = to_rank_0(ours, source, (len(order), width), torch.float32, device)
        if received is not None:
            scores[order, :width] = received.numpy()
    scores[~batch.real] = 0.0
    return scores


def mean_metrics(outputs: Sequence[losses.Sums], tokens: int, device: torch.device) -> dict[str, float]:
    """Return the metrics over the whole batch, on every rank: sums over micro-batches and replicas / `tokens`.

    `outputs` are those of the ranks that report, one of each replica; empty elsewhere (collective).
    """
    sums = torch.zeros(len(losses.METRICS), 2, dtype=torch.float64)  # value, how many gave one
    for output in outputs:
        for name, value in output.items():
            sums[losses.METRICS.index(name)] += torch.tensor([float(value), 1.0], dtype=torch.float64)
    sums = sums.to(device)
    dist.all_reduce(sums)
    values = zip(losses.METRICS, sums.tolist(), strict=True)
    return {"tokens": float(tokens), **{name: value / tokens for name, (value, given) in values if given}}
