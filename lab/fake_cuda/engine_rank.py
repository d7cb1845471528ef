"""One rank of the training engine on the fake device, of any model: what its device holds at most in a step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy
import torch

from hetrl.runtime.megatron.batch import TokenBatch
from hetrl.runtime.megatron.engine import MegatronEngine, OptimizerSettings
from hetrl.runtime.megatron.layout import Layout
from hetrl.runtime.wan.world import start_wan_world, stop_wan_world
from hetrl.runtime.wire import LossSettings
from hetrl.workload import architecture
from lab.fake_cuda.device import FakeCuda


@dataclass(frozen=True)
class EngineRank:
    """A rank of a bf16 model of the catalogue; all sequences have `tokens` tokens. Without `training` it scores."""

    model: str
    layout: Layout
    rank: int
    tokens: int
    training: bool = True
    recompute: str = "none"
    recompute_layers: int | None = None
    distributed: bool = True
    offload: bool = False


@dataclass(frozen=True)
class _Address:
    address: str


@dataclass(frozen=True)
class Asleep:
    """What an engine that sleeps still has on its device, and what it has on the host."""

    device_bytes: int
    host_bytes: int


def play(case: EngineRank) -> Asleep | None:
    """Build the engine, give it weights, and take two steps (Adam makes its moments in the first) or score a batch.

    With `offload` it sleeps in between; returns what it had then.
    """
    ranks = tuple(f"here/ranks/{number}" for number in range(case.layout.world_size))
    start_wan_world(_Address(ranks[case.rank]), ranks, case.rank, timeout_seconds=60.0)  # type: ignore[arg-type]
    engine = MegatronEngine(
        config_of(case.model),
        case.layout,
        rank=case.rank,
        dtype="bfloat16",
        optimizer=OptimizerSettings(learning_rate=1e-6, distributed=case.distributed) if case.training else None,
        seed=0,
        recompute=case.recompute,
        recompute_layers=case.recompute_layers,
    )
    engine.load(_weights(engine))
    batch = _batch(sum(case.layout.samples), case.tokens, case.training)
    asleep = None
    for step in range(2):
        if case.offload:
            engine.sleep(offload=True)
            asleep = Asleep(FakeCuda.active.held_bytes, engine.host_bytes)
            engine.wake()
        if case.training:
            engine.train_step(batch, LossSettings(kl_coefficient=0.1))
        elif step == 0:
            engine.score(batch)
    engine.close()
    stop_wan_world()
    return asleep


def config_of(model: str) -> dict[str, Any]:
    """Return what config.json says of a Qwen3 of the catalogue."""
    shape = architecture(model)
    return {
        "model_type": "qwen3",
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.intermediate,
        "vocab_size": shape.vocabulary,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": shape.tied_embeddings,
        "max_position_embeddings": 40960,
        "rope_theta": 1e6,
    }


def _weights(engine: MegatronEngine) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tensors of the right shapes; what is in them counts for nothing here."""
    for name, home in engine.shards.homes.items():
        yield name, torch.empty(home.shape, dtype=torch.bfloat16)


def _batch(samples: int, tokens: int, training: bool) -> TokenBatch:
    shape = (samples, tokens)
    mask = numpy.ones(shape, dtype=bool)
    mask[:, 0] = False
    names = ("advantages", "old_logprobs", "reference_logprobs") if training else ()
    extras = {name: numpy.zeros(shape, dtype=numpy.float32) for name in names}
    return TokenBatch(numpy.ones(shape, dtype=numpy.int64), numpy.full(samples, tokens), mask, extras)
