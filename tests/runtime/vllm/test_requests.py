"""Requests to a vLLM server, which is a function here: when they hang, and which contexts they share."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from hetrl.runtime import wire
from hetrl.runtime.vllm import server as server_module
from hetrl.runtime.vllm.server import GENERATE, SilentError
from tests.runtime.vllm.vllm_cases import HANG_SECONDS, Served, weight_file

SAMPLING = wire.Sampling(samples=1, max_tokens=4, temperature=1.0, top_p=1.0, seed=0, stop_tokens=())


def served(path: Path, takes: float) -> tuple[Served, list[str]]:
    """Answer a request once it has gone on for `takes` seconds in all, all else at once; return the salts, too."""
    server, salts = Served(path), list[str]()

    async def draw(body: Mapping[str, Any] | None) -> dict[str, Any]:
        assert body is not None
        salts.append(body["cache_salt"])
        await asyncio.sleep(takes)
        choice = {"token_ids": [5], "logprobs": None, "weight_versions": None, "finish_reason": "length", "index": 0}
        return {"choices": [choice]}

    server.answer, server.answered = draw, GENERATE
    return server, salts


@pytest.mark.parametrize(
    ("hold", "go_on"), [("/pause?mode=keep", "/resume"), ("/sleep?level=1", "/wake_up?tags=kv_cache")]
)
def test_a_request_does_not_hang_while_it_is_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hold: str, go_on: str
) -> None:
    monkeypatch.setattr(server_module, "LOOK_SECONDS", 0.05)

    async def scenario() -> tuple[wire.Sample, ...]:
        server, _ = served(tmp_path, 3 * HANG_SECONDS)
        drawing = asyncio.create_task(server.generate([1], SAMPLING, 60.0))
        await asyncio.sleep(0.05)
        await server.call(hold)
        await asyncio.sleep(3 * HANG_SECONDS)
        await server.call(go_on)
        return await drawing

    assert [sample.tokens for sample in asyncio.run(scenario())] == [(5,)]


def test_a_request_that_goes_on_without_an_answer_hangs(tmp_path: Path) -> None:
    with pytest.raises(SilentError, match=f"no answer to {GENERATE} in {HANG_SECONDS:g} s"):
        asyncio.run(served(tmp_path, 60.0)[0].generate([1], SAMPLING, 60.0))


def test_prompts_share_contexts_of_one_version_only(tmp_path: Path) -> None:
    async def scenario() -> list[str]:
        server, salts = served(tmp_path, 0.0)
        for version in (1, 2):
            await server.generate([1], SAMPLING, 60.0)
            await server.update_weights(version, weight_file(tmp_path, version), 60.0, recompute=False)
        await server.generate([1], SAMPLING, 60.0)
        await server.generate([1, 5], SAMPLING, 60.0, since=1)  # it goes on with what it has
        return salts

    assert asyncio.run(scenario()) == ["0", "1", "2", "1"]
