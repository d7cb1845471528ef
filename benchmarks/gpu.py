"""What the engines of a run do on one GPU, beside what plans say of it. Needs a CUDA GPU of a type of the catalogue.

training  optimiser steps and scorings on one rank of megatron-core, of Qwen3 models or some layers of one
serving   a vLLM server of Qwen3-8B that continues equal prompts
versions  how long that server is held for a whole version of its weights, from the file whose digest is proven

A part that is run alone (`--part`) leaves the others as they are in the result.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy
import torch
from _results import RESULTS, write_result
from pause import CALL_SECONDS, SAID_TOKENS, START_SECONDS, UNDER_WAY, VERSIONS, drawn, held, written
from torch._C._distributed_c10d import HashStore

from hetrl.cost.efficiency import PLANNED_ENGINE
from hetrl.questions.answer import Answer
from hetrl.questions.serving import generation, inference
from hetrl.questions.step import SoloTraining
from hetrl.questions.training import training
from hetrl.runtime import wire
from hetrl.runtime.instruments.profile import software
from hetrl.runtime.megatron.batch import TokenBatch
from hetrl.runtime.megatron.engine import MegatronEngine, OptimizerSettings, start_world, stop_world
from hetrl.runtime.megatron.layout import Layout
from hetrl.runtime.vllm.server import VllmServer, VllmSettings
from hetrl.runtime.weights.safetensors_file import HEADER_BYTES, places_of
from hetrl.runtime.weights.tiny_model import write_tiny_model
from hetrl.runtime.wire import LossSettings
from hetrl.workload import Architecture, architecture
from lab.fake_cuda.engine_rank import config_of

PARTS = ("training", "serving", "versions")
SERVED, CACHE_BYTES, MOST_SEQUENCES, MOST_TOKENS = "qwen3-8b", 30 * 10**9, 256, 4096
PAUSE_SECONDS = 0.5  # to reach
WARM_UP, REPETITIONS = 1, 3  # of a step


@dataclass(frozen=True)
class Trained:
    """Equal sequences of `tokens`; of the model the first `layers` (None: all), with embedding and head."""

    model: str
    layers: int | None
    tokens: int
    samples: int
    micro_batch: int
    recompute: str

    @property
    def architecture(self) -> Architecture:
        """Return the shape that is trained."""
        whole = architecture(self.model)
        return whole if self.layers is None else replace(whole, layers=self.layers)

    @property
    def name(self) -> str:
        """Return the case in a few words."""
        part = "" if self.layers is None else f", {self.layers} layers"
        return f"{self.model}{part}, {self.samples} x {self.tokens} tokens in {self.micro_batch}s"


TRAINED = (
    Trained("qwen3-8b", 6, 1024, 16, 4, "none"),
    Trained("qwen3-8b", 6, 4096, 4, 1, "full"),
    Trained("qwen3-1.7b", None, 2048, 8, 2, "none"),
    Trained("qwen3-0.6b", None, 4096, 8, 2, "none"),
    Trained("qwen3-1.7b", None, 4096, 4, 1, "selective"),
)
SERVING = ((1, 128, 256), (16, 512, 256), (64, 512, 256), (256, 128, 256), (256, 1024, 128))  # batch, prompt, response


def trained(case: Trained, gpu: str) -> dict[str, Any]:
    """Return what the case takes and holds, beside what is predicted."""
    model = case.architecture
    seconds, scored, held_gb = _taken(case)
    gc.collect()  # megatron's modules refer to each other
    torch.cuda.empty_cache()
    step = training(
        SoloTraining(
            model,
            gpu,
            1,
            case.tokens,
            samples=case.samples,
            micro_batch=case.micro_batch,
            recompute=case.recompute,
            sharding="none",
            offload="none",
        )
    )
    score = inference(model, gpu, samples=case.samples, sequence=case.tokens, micro_batch=case.micro_batch)
    row = {
        "case": f"{case.name}, recompute {case.recompute}",
        "step": _beside(seconds, step),
        "score": _beside(scored, score),
        "memory": {"held_gb": held_gb, "predicted_gb": step.memory_gb, "error": step.memory_gb / held_gb - 1},
        "mfu": step.details["mfu"] * step.seconds / seconds,
    }
    _say(json.dumps(row))
    return row


def _taken(case: Trained) -> tuple[float, float, float]:
    """Return the seconds of an optimiser step and of a scoring, and the most bytes (GB) that torch had in use."""
    model = case.architecture
    torch.cuda.reset_peak_memory_stats()
    engine = MegatronEngine(
        {**config_of(case.model), "num_hidden_layers": model.layers},
        Layout(1, ((0, model.layers),), (case.samples,), case.micro_batch),
        rank=0,
        dtype="bfloat16",
        optimizer=OptimizerSettings(learning_rate=1e-6),
        seed=0,
        recompute=case.recompute,
    )
    engine.load((name, _weight(home.shape)) for name, home in engine.shards.homes.items())
    batch = _batch(case, model.vocabulary)
    settings = LossSettings(kl_coefficient=0.1)
    seconds = _median(lambda: engine.train_step(batch, settings))
    held_gb = torch.cuda.max_memory_allocated() / 1e9
    scored = _median(lambda: engine.score(batch))
    engine.close()
    return seconds, scored, held_gb


def _say(what: str) -> None:
    print(f"{time.monotonic():.0f} s: {what}", file=sys.stderr, flush=True)


def _weight(shape: Sequence[int]) -> torch.Tensor:
    whole = torch.empty(tuple(shape), dtype=torch.bfloat16, device="cuda")
    return whole.fill_(1.0) if len(shape) == 1 else whole.normal_(0.0, 0.02)


def _batch(case: Trained, vocabulary: int) -> TokenBatch:
    shape = (case.samples, case.tokens)
    chance = numpy.random.default_rng(0)
    mask = numpy.ones(shape, dtype=bool)
    mask[:, 0] = False
    extras = {name: numpy.full(shape, -10.0, numpy.float32) for name in ("old_logprobs", "reference_logprobs")}
    extras["advantages"] = chance.standard_normal(shape).astype(numpy.float32)
    return TokenBatch(chance.integers(0, vocabulary, shape), numpy.full(case.samples, case.tokens), mask, extras)


def _median(run: Callable[[], Any]) -> float:
    """Return the seconds of a run that ends with a number on the host."""
    found = []
    for number in range(WARM_UP + REPETITIONS):
        torch.cuda.synchronize()
        began = time.perf_counter()
        run()
        torch.cuda.synchronize()
        if number >= WARM_UP:
            found.append(time.perf_counter() - began)
    return statistics.median(found)


def _beside(seconds: float, answer: Answer) -> dict[str, float]:
    return {"seconds": seconds, "predicted": answer.seconds, "error": answer.seconds / seconds - 1}


async def served(gpu: str, parts: Sequence[str], work: Path) -> dict[str, Any]:
    """Start the server, give it two versions in turn, let it continue prompts."""
    files = _versions_of(work)
    settings = VllmSettings(
        model_directory=_model_directory(work / "model"),
        kv_cache_bytes=CACHE_BYTES,
        max_sequences=MOST_SEQUENCES,
        max_model_tokens=MOST_TOKENS,
        dtype="bfloat16",
        device="cuda",
    )
    torch.cuda.empty_cache()
    server = VllmServer(settings, work / "server", work / "vllm.log")
    began = time.monotonic()
    try:
        await server.start(START_SECONDS)
        found: dict[str, Any] = {"start_seconds": time.monotonic() - began}
        _say("server started")
        await server.update_weights(0, files[0], CALL_SECONDS)
        if "serving" in parts:
            found["serving"] = [await _continued(server, gpu, *one) for one in SERVING]
        if "versions" in parts:
            found["versions"] = await _versions(server, files)
    except BaseException:
        print((work / "vllm.log").read_text(errors="replace")[-6000:])
        raise
    finally:
        await server.stop()
    return found


def _model_directory(path: Path) -> Path:
    """Write configuration and tokenizer of the served model, whose weights come as versions."""
    write_tiny_model(path)
    file = path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **config_of(SERVED), "dtype": "bfloat16"}))
    return path


def _versions_of(work: Path) -> list[Path]:
    """Write two versions of the served model, drawn from a seed; they differ in the last norm."""
    torch.manual_seed(0)
    first = written({name: _weight(shape).cpu() for name, shape in _shapes()}, work / "version-0")
    second = Path(shutil.copyfile(first, work / "version-1"))
    spec, start = places_of(second)["model.norm.weight"]
    with second.open("r+b") as file:
        file.seek(HEADER_BYTES + start)
        file.write(torch.full(spec.shape, 2.0, dtype=torch.bfloat16).view(torch.uint8).numpy().tobytes())
    _say("versions written")
    return [first, second]


def _shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the tensors of Qwen3 (https://huggingface.co/Qwen/Qwen3-8B, model.safetensors.index.json)."""
    model = architecture(SERVED)
    heads, kv = model.heads * model.head_dim, model.kv_heads * model.head_dim
    yield "model.embed_tokens.weight", (model.vocabulary, model.hidden)
    for number in range(model.layers):
        layer = f"model.layers.{number}"
        for name, rows, columns in (
            ("self_attn.q_proj", heads, model.hidden),
            ("self_attn.k_proj", kv, model.hidden),
            ("self_attn.v_proj", kv, model.hidden),
            ("self_attn.o_proj", model.hidden, heads),
            ("mlp.gate_proj", model.intermediate, model.hidden),
            ("mlp.up_proj", model.intermediate, model.hidden),
            ("mlp.down_proj", model.hidden, model.intermediate),
        ):
            yield f"{layer}.{name}.weight", (rows, columns)
        for name in ("self_attn.q_norm", "self_attn.k_norm"):
            yield f"{layer}.{name}.weight", (model.head_dim,)
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{layer}.{name}.weight", (model.hidden,)
    yield "model.norm.weight", (model.hidden,)
    yield "lm_head.weight", (model.vocabulary, model.hidden)


async def _continued(server: VllmServer, gpu: str, batch: int, prompt: int, response: int) -> dict[str, Any]:
    """Return what equal prompts of unlike tokens take, from the first request to the last answer; the better of two."""
    found = []
    for attempt in range(2):
        chance = random.Random(attempt)
        prompts = [[chance.randrange(1000, 100_000) for _ in range(prompt)] for _ in range(batch)]
        sampling = wire.Sampling(samples=1, max_tokens=response, temperature=1.0, top_p=1.0, seed=0, stop_tokens=())
        began = time.monotonic()
        await asyncio.gather(*(server.generate(one, sampling, CALL_SECONDS) for one in prompts))
        found.append(time.monotonic() - began)
    answer = generation(architecture(SERVED), gpu, batch=batch, prompt=prompt, response=response, engine=PLANNED_ENGINE)
    row = {"batch": batch, "prompt": prompt, "response": response, **_beside(min(found), answer)}
    _say(json.dumps(row))
    return {**row, "tokens_per_second": batch * response / min(found)}


async def _versions(server: VllmServer, files: Sequence[Path]) -> dict[str, Any]:
    """Return how long versions hold the server, idle and drawing, and whether it says what each version says."""
    said = []
    for number in (0, 1, 0):
        await server.update_weights(number, files[number], CALL_SECONDS)
        said.append(await drawn(server, SAID_TOKENS, 0))
    rest = await held(server, files)
    async with asyncio.TaskGroup() as group:
        requests = [group.create_task(drawn(server, 1024, seed)) for seed in range(UNDER_WAY)]
        await asyncio.sleep(2.0)
        busy = await held(server, files)
        for request in requests:
            request.cancel()
    await server.abort_all()
    exact = said[0] == said[2] and said[0] != said[1]
    return {"bytes": files[0].stat().st_size, "rest": rest, "busy": busy, "says_the_version_s": exact}


@contextmanager
def _world() -> Iterator[None]:
    start_world(0, 1, HashStore(), CALL_SECONDS, "cuda:0")
    try:
        yield
    finally:
        stop_world()


def table_of(result: Mapping[str, Any]) -> str:
    """Return the part of the page."""
    versions = result["software"]
    lines = [f"One {result['device']}, counted as `{result['gpu']}`; " + ", ".join(map(" ".join, versions.items()))]
    lines[0] += ". Predicted: with the shares of the catalogue, before anything that was measured here."
    if rows := result.get("training"):
        lines += ["", f"Megatron-core, one rank, bf16 with Adam in fp32; medians of {REPETITIONS}:", ""]
        lines += ["| case | step, s | predicted | score, s | predicted | held, GB | predicted | of the peak |"]
        lines += ["| --- " * 8 + "|"]
        for row in rows:
            step, score, memory = row["step"], row["score"], row["memory"]
            lines.append(
                f"| {row['case']} | {step['seconds']:.3f} | {step['error']:+.0%} | {score['seconds']:.3f} "
                f"| {score['error']:+.0%} | {memory['held_gb']:.1f} | {memory['error']:+.0%} | {row['mfu']:.0%} |"
            )
    if rows := result.get("serving"):
        lines += ["", f"vLLM, {SERVED} in bf16 with drawn weights; prompts at once until the last has its tokens:", ""]
        lines += ["| prompts | tokens of each | drawn for each | s | predicted | tokens/s |", "| --- " * 6 + "|"]
        lines += [
            f"| {row['batch']} | {row['prompt']} | {row['response']} | {row['seconds']:.2f} | {row['error']:+.0%} "
            f"| {row['tokens_per_second']:,.0f} |"
            for row in rows
        ]
    if found := result.get("versions"):
        verdict = "reached" if found["busy"]["seconds"] <= PAUSE_SECONDS else "not reached"
        lines += [
            "",
            f"The same server held for whole versions of {found['bytes'] / 1e9:.1f} GB in the node's memory, medians "
            f"of {VERSIONS}: {found['rest']['seconds']:.2f} s with nothing to draw, {found['busy']['seconds']:.2f} s "
            f"with {UNDER_WAY} requests under way (longest {found['busy']['worst']:.2f} s), of which loading "
            f"{found['busy']['load_seconds']:.2f} s. To reach: {PAUSE_SECONDS:g} s; {verdict}. A version that comes "
            f"again says the same to the last bit: {'yes' if found['says_the_version_s'] else 'NO'}.",
        ]
    return "\n".join(lines)


def main() -> None:
    """Measure the parts that are asked for, write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("gpu", help="the type of the catalogue, as h100")
    parser.add_argument("--part", action="append", choices=PARTS, help="only this one (may be repeated)")
    parser.add_argument("--work", type=Path, default=Path("/dev/shm"), help="where versions lie, as at a run")
    arguments = parser.parse_args()
    parts = arguments.part or PARTS
    kept = json.loads((RESULTS / "gpu.json").read_text()) if (RESULTS / "gpu.json").exists() else {}
    result = {part: kept[part] for part in PARTS if part in kept}
    result |= {"gpu": arguments.gpu, "device": torch.cuda.get_device_name(), "software": software()}
    if "training" in parts:
        with _world():
            result["training"] = [trained(case, arguments.gpu) for case in TRAINED]
    if "serving" in parts or "versions" in parts:
        with tempfile.TemporaryDirectory(dir=arguments.work) as work:
            result |= asyncio.run(served(arguments.gpu, parts, Path(work)))
    table = table_of(result)
    write_result("gpu", result, table)
    print(table)


if __name__ == "__main__":
    main()
