"""What the engines of hetrl reach on one machine: a training step of megatron-core, decoding of a vLLM server."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy
import torch
from safetensors.torch import save_file
from torch._C._distributed_c10d import HashStore

from hetrl.describe.measured import Measurement, Question
from hetrl.runtime.instruments.timing import Repetitions
from hetrl.runtime.megatron.batch import TokenBatch
from hetrl.runtime.megatron.hf_weights import random_weights, read_config
from hetrl.runtime.megatron.layout import Layout
from hetrl.runtime.vllm.server import VllmServer, VllmSettings
from hetrl.runtime.weights.tiny_model import VOCABULARY, write_tiny_model
from hetrl.runtime.wire import LossSettings, Sampling

SEQUENCES, TOKENS, MICRO_BATCH = 8, 128, 4  # of a training step
DECODED_SEQUENCES, DECODED_TOKENS = 16, 128
_PROMPT = (5, 6, 7, 8)
_LAYERS = 2
_MODEL = f"tiny-qwen3-{_LAYERS}-layers"
_ENGINE_SECONDS = 60.0  # for a world to meet, and for each of its collectives


def training_steps(device: torch.device, how: Repetitions) -> Iterator[Measurement]:
    """Yield the time of one optimiser step of a two-layer Qwen3 on one rank."""
    from hetrl.runtime.megatron.engine import MegatronEngine, OptimizerSettings, start_world, stop_world

    with tempfile.TemporaryDirectory() as root:
        write_tiny_model(Path(root), layers=_LAYERS)
        config = read_config(root)
    start_world(0, 1, HashStore(), _ENGINE_SECONDS, "cuda:0" if device.type == "cuda" else "cpu")
    try:
        engine = MegatronEngine(
            config,
            Layout(1, ((0, _LAYERS),), (SEQUENCES,), MICRO_BATCH),
            rank=0,
            dtype="bfloat16" if device.type == "cuda" else "float32",
            optimizer=OptimizerSettings(learning_rate=1e-6),
            seed=0,
            timeout_seconds=_ENGINE_SECONDS,
        )
        engine.load(random_weights(config, 0))
        batch = _batch()
        seconds = how.times(lambda: engine.train_step(batch, LossSettings(loss="supervised")), torch.device("cpu"))
        engine.close()
    finally:
        stop_world()
    question: Question = {"model": _MODEL, "batch": SEQUENCES, "sequence": TOKENS}
    yield Measurement("megatron step", question, "tokens", float(SEQUENCES * TOKENS), how.warm_up, seconds)


def _batch() -> TokenBatch:
    tokens = numpy.random.default_rng(0).integers(3, len(VOCABULARY), (SEQUENCES, TOKENS))
    mask = numpy.ones(tokens.shape, dtype=bool)
    mask[:, 0] = False
    return TokenBatch(tokens, numpy.full(SEQUENCES, TOKENS), mask)


def decoding(device: torch.device, how: Repetitions, start_seconds: float) -> Iterator[Measurement]:
    """Yield the time in which a vLLM server of a tiny Qwen3 continues a batch of requests, HTTP included.

    Raises HetrlError where it is not up after `start_seconds` or does not answer.
    """
    with tempfile.TemporaryDirectory(prefix="profile-") as root:
        directory = Path(root) / "model"
        write_tiny_model(directory, layers=_LAYERS)
        save_file(dict(random_weights(read_config(directory), 0)), directory / "model.safetensors")
        settings = VllmSettings(
            model_directory=directory,
            kv_cache_bytes=2**28,
            max_sequences=DECODED_SEQUENCES,
            max_model_tokens=2 * DECODED_TOKENS,
            dtype="bfloat16" if device.type == "cuda" else "float32",
            load_format="auto",
            device=device.type,
        )
        server = VllmServer(settings, Path(root) / "server", Path(root) / "server.log")
        seconds = asyncio.run(_decode(server, how, start_seconds))
    question: Question = {"model": _MODEL, "batch": DECODED_SEQUENCES, "response": DECODED_TOKENS}
    decoded = float(DECODED_SEQUENCES * DECODED_TOKENS)
    yield Measurement("vllm decode", question, "tokens", decoded, how.warm_up, seconds)


async def _decode(server: VllmServer, how: Repetitions, start_seconds: float) -> tuple[float, ...]:
    sampling = Sampling(samples=DECODED_SEQUENCES, max_tokens=DECODED_TOKENS, temperature=1.0, top_p=1.0, seed=0)
    samples: list[float] = []
    await server.start(start_seconds)
    try:
        for _ in range(how.warm_up):
            await server.generate(_PROMPT, sampling, start_seconds)
        deadline = time.monotonic() + how.seconds
        while not samples or (len(samples) < how.count and time.monotonic() < deadline):
            start = time.perf_counter()
            await server.generate(_PROMPT, sampling, start_seconds)
            samples.append(time.perf_counter() - start)
    finally:
        await server.stop()
    return tuple(samples)
