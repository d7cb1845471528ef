"""How long a vLLM server that draws samples is held for a weight version: versions of real optimiser steps, on a CPU.

whole   as hetrl does it: the whole version is loaded from the file whose digest is proven
patched vLLM's `checkpoint_weight_patch`: only the weights that differ, in place
"""

from __future__ import annotations

import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from _results import ROOT, write_result
from safetensors.torch import load_file

from hetrl.runtime import wire
from hetrl.runtime.vllm import command
from hetrl.runtime.vllm.server import VllmServer, VllmSettings
from hetrl.runtime.weights.safetensors_file import HEADER_BYTES, header_of

WORKER = "_pause_worker.PatchingWorker"
SIZES, RATE, STEP = ("0.1B", "0.35B"), 1e-6, 1
UNDER_WAY = 8  # requests
VERSIONS = 10
PROMPT, TOKENS = tuple(range(3, 67)), 1024
SAID_TOKENS = 64  # of a sample that tells versions apart by its log-probs
CALL_SECONDS, START_SECONDS = 600.0, 300.0
GOAL_SECONDS = 0.5
LARGE = 8.19e9 * 2  # bytes of Qwen3-8B in bf16


async def measure(size: str, work: Path) -> dict[str, Any]:
    """Return what versions of a model cost a server of it."""
    script = ROOT / "benchmarks" / "_weight_steps.py"
    subprocess.run([sys.executable, script, work, size, str(RATE)], check=True, stdout=sys.stderr)
    steps = [work / f"steps-{step}.safetensors" for step in (0, STEP)]
    files = [written(load_file(path), work / f"version-{number}") for number, path in enumerate(steps)]
    settings = VllmSettings(
        model_directory=work / "model",
        kv_cache_bytes=2**30,
        max_sequences=UNDER_WAY,
        max_model_tokens=len(PROMPT) + TOKENS,
        dtype="bfloat16",
    )
    server = VllmServer(settings, work, work / "vllm.log")
    await server.start(START_SECONDS)
    try:
        at_rest = await held(server, files)
        async with asyncio.TaskGroup() as group:
            requests = [group.create_task(drawn(server, TOKENS, seed)) for seed in range(UNDER_WAY)]
            await asyncio.sleep(5.0)
            busy = await held(server, files)
            for request in requests:
                request.cancel()
        await server.abort_all()
        patched = await patch(server, files, steps)
    finally:
        await server.stop()
    return {"model": size, "bytes": files[0].stat().st_size, "rest": at_rest, "busy": busy, "patched": patched}


def written(tensors: Mapping[str, torch.Tensor], path: Path) -> Path:
    """Write weights as a replica's agent does; return the file."""
    places, start = dict[str, tuple[wire.TensorSpec, int]](), 0
    for name, tensor in tensors.items():
        places[name] = wire.TensorSpec(name, "bfloat16", tuple(tensor.shape), tensor.nbytes), start
        start += tensor.nbytes
    with path.open("wb") as file:
        file.write(header_of(places).ljust(HEADER_BYTES))
        for tensor in tensors.values():
            file.write(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return path


async def held(server: VllmServer, files: Sequence[Path]) -> dict[str, float]:
    """Load versions in turn; return the medians of how long all of it takes, and the loading in it."""
    whole, load = [], []
    for number in range(VERSIONS):
        began = time.monotonic()
        await server.pause()
        paused = time.monotonic()
        await server.load_weights(number, files[number % 2], CALL_SECONDS)
        load.append(time.monotonic() - paused)
        await server.resume()
        whole.append(time.monotonic() - began)
        await asyncio.sleep(0.5)
    return {"seconds": statistics.median(whole), "load_seconds": statistics.median(load), "worst": max(whole)}


async def drawn(server: VllmServer, tokens: int, seed: int) -> tuple[Sequence[int], Sequence[float]]:
    """Return tokens and log-probs of a sample, which say what the server's weights are."""
    sampling = wire.Sampling(samples=1, max_tokens=tokens, temperature=1.0, top_p=1.0, seed=seed, stop_tokens=())
    (sample,) = await server.generate(PROMPT, sampling, CALL_SECONDS)
    return sample.tokens, sample.logprobs


async def patch(server: VllmServer, files: Sequence[Path], steps: Sequence[Path]) -> dict[str, Any]:
    """Let vLLM change in place what differs from version 0; return how long, and whether it then serves version 1."""
    wanted = {}
    for number in (1, 0):
        await server.update_weights(number, files[number], CALL_SECONDS)
        wanted[number] = await drawn(server, SAID_TOKENS, 0)
    assert wanted[0] != wanted[1], "two versions that say the same tell nothing"
    await server.pause()
    arguments = {"method": "patch", "args": [str(step) for step in steps]}
    (found,) = (await server.call("/collective_rpc", arguments, CALL_SECONDS))["results"]
    await server.resume()
    said = await drawn(server, SAID_TOKENS, 0)
    serves = next((f"version {number}" for number, one in wanted.items() if one == said), "neither version")
    return {**found, "serves": serves}


def table_of(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the part of the page."""
    per_gb = rows[-1]["busy"]["load_seconds"] / rows[-1]["bytes"] * 1e9
    lines = [
        f"How long a vLLM server (bf16, one thread of a CPU) is held for a version, with nothing to draw and with "
        f"{UNDER_WAY} requests under way; medians of {VERSIONS} versions, which differ as by one step of Adam at "
        f"{RATE:g}. Whole: from the file whose digest is proven, as hetrl does it; of that, loading. In place: vLLM's "
        "`checkpoint_weight_patch` on the weights that differ (finding them is not counted), and what the server says "
        f"after it. To reach: at most {GOAL_SECONDS:g} s. Not measured: {LARGE * 1e-9:.1f} GB of an 8B model at "
        f"{per_gb:.2f} s/GB, the last line's, would be {per_gb * LARGE * 1e-9:.1f} s; a GPU reads the file at the rate "
        "of PCIe, which plans count with (docs/cost-model.md).",
        "",
        "| model | bytes | at rest | drawing | longest | of which loading | in place | then it serves |",
        "| --- " * 8 + "|",
    ]
    for row in rows:
        patched = row["patched"]
        how = patched.get("refused") or f"{patched['seconds']:.2f} s"
        lines.append(
            f"| {row['model']} | {row['bytes'] / 1e6:.0f} MB | {row['rest']['seconds']:.2f} s "
            f"| {row['busy']['seconds']:.2f} s | {row['busy']['worst']:.2f} s | {row['busy']['load_seconds']:.2f} s "
            f"| {how} | {patched['serves']} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure all, write the result."""
    command.EXTENSION = WORKER
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(ROOT / "benchmarks"), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    rows = []
    for size in SIZES:
        with tempfile.TemporaryDirectory() as directory:
            rows.append(asyncio.run(measure(size, Path(directory))))
        print(rows[-1], file=sys.stderr, flush=True)
    table = table_of(rows)
    write_result("pause", {"rows": rows}, table)
    print(table)


if __name__ == "__main__":
    main()
