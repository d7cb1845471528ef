"""A vLLM server on a GPU for the bench `gpu`: how it continues prompts, how long versions of its weights hold it."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from pause import CALL_SECONDS, SAID_TOKENS, START_SECONDS, UNDER_WAY, drawn, held, written

from hetrl.cost.efficiency import PLANNED_ENGINE
from hetrl.questions.answer import Answer
from hetrl.questions.serving import generation
from hetrl.runtime import wire
from hetrl.runtime.megatron.hf_weights import homes
from hetrl.runtime.vllm.server import VllmServer, VllmSettings
from hetrl.runtime.weights.safetensors_file import HEADER_BYTES, places_of
from hetrl.runtime.weights.tiny_model import write_tiny_model
from hetrl.workload import architecture
from lab.fake_cuda.engine_rank import config_of

SERVED, CACHE_BYTES, MOST_SEQUENCES, MOST_TOKENS = "qwen3-8b", 30 * 10**9, 256, 4096
SERVING = ((1, 128, 256), (16, 512, 256), (64, 512, 256), (256, 128, 256), (256, 1024, 128))  # batch, prompt, response


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
        say("server started")
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
    first = written(
        {name: drawn_weight(home.shape).cpu() for name, home in homes(architecture(SERVED)).items()}, work / "version-0"
    )
    second = Path(shutil.copyfile(first, work / "version-1"))
    spec, start = places_of(second)["model.norm.weight"]
    with second.open("r+b") as file:
        file.seek(HEADER_BYTES + start)
        file.write(torch.full(spec.shape, 2.0, dtype=torch.bfloat16).view(torch.uint8).numpy().tobytes())
    say("versions written")
    return [first, second]


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
    row = {"batch": batch, "prompt": prompt, "response": response, **beside(min(found), answer)}
    say(json.dumps(row))
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


def beside(seconds: float, answer: Answer) -> dict[str, float]:
    """Return measured and predicted seconds, and how far off these are."""
    return {"seconds": seconds, "predicted": answer.seconds, "error": answer.seconds / seconds - 1}


def drawn_weight(shape: Sequence[int]) -> torch.Tensor:
    """Return a weight on the GPU, as a model begins with."""
    whole = torch.empty(tuple(shape), dtype=torch.bfloat16, device="cuda")
    return whole.fill_(1.0) if len(shape) == 1 else whole.normal_(0.0, 0.02)


def say(what: str) -> None:
    """Print what is done; a machine that is lent for minutes may end before the result is written."""
    print(f"{time.monotonic():.0f} s: {what}", file=sys.stderr, flush=True)
