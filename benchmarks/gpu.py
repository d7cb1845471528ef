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
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy
import torch
from _gpu_server import SERVED, beside, drawn_weight, say, served
from _results import RESULTS, write_result
from pause import CALL_SECONDS, UNDER_WAY, VERSIONS
from torch._C._distributed_c10d import HashStore

from hetrl.gpus import gpu_type
from hetrl.questions.serving import inference
from hetrl.questions.step import SoloTraining
from hetrl.questions.training import training
from hetrl.runtime.instruments.profile import software
from hetrl.runtime.instruments.timing import Repetitions
from hetrl.runtime.megatron.batch import TokenBatch
from hetrl.runtime.megatron.engine import MegatronEngine, OptimizerSettings, start_world, stop_world
from hetrl.runtime.megatron.layout import Layout
from hetrl.runtime.wire import LossSettings
from hetrl.workload import Architecture, architecture
from lab.fake_cuda.engine_rank import config_of

PARTS = ("training", "serving", "versions")
PAUSE_SECONDS = 0.5  # to reach
STEPS = Repetitions(warm_up=1, count=3, seconds=60.0)


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
        "step": beside(seconds, step),
        "score": beside(scored, score),
        "memory": {"held_gb": held_gb, "predicted_gb": step.memory_gb, "error": step.memory_gb / held_gb - 1},
        "mfu": step.details["mfu"] * step.seconds / seconds,
    }
    say(json.dumps(row))
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
    engine.load((name, drawn_weight(home.shape)) for name, home in engine.shards.homes.items())
    batch = _batch(case, model.vocabulary)
    settings = LossSettings(kl_coefficient=0.1)
    seconds = _median(lambda: engine.train_step(batch, settings))
    held_gb = torch.cuda.max_memory_allocated() / 1e9
    scored = _median(lambda: engine.score(batch))
    engine.close()
    return seconds, scored, held_gb


def _batch(case: Trained, vocabulary: int) -> TokenBatch:
    shape = (case.samples, case.tokens)
    chance = numpy.random.default_rng(0)
    mask = numpy.ones(shape, dtype=bool)
    mask[:, 0] = False
    extras = {name: numpy.full(shape, -10.0, numpy.float32) for name in ("old_logprobs", "reference_logprobs")}
    extras["advantages"] = chance.standard_normal(shape).astype(numpy.float32)
    return TokenBatch(chance.integers(0, vocabulary, shape), numpy.full(case.samples, case.tokens), mask, extras)


def _median(run: Callable[[], Any]) -> float:
    """Return the seconds of a run that ends with a number on the host, whose clock tells the time then."""
    return statistics.median(STEPS.times(run, torch.device("cpu")))


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
    lines[0] += ". Predicted: with the catalogue, whose numbers of these engines are fitted to one H200."
    if rows := result.get("training"):
        lines += ["", f"Megatron-core, one rank, bf16 with Adam in fp32; medians of {STEPS.count}:", ""]
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
    gpu_type(arguments.gpu)
    if not torch.cuda.is_available():
        sys.exit("error: torch sees no CUDA device on this machine")
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
