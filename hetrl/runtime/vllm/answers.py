"""What a vLLM server answers, and what it printed before it ended."""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Mapping
from typing import Any

import httpx

from hetrl.runtime import wire


def last_words(log: str) -> str:
    """Return the line of a log that tells most: the last error, else the last line; without vLLM's prefixes."""
    lines = [re.sub(r"^\(\w+ pid=\d+\) *", "", line).strip() for line in log.splitlines()]
    lines = [line for line in lines if line and not line.startswith(("For further information", "^"))]
    errors = [line for line in lines if re.match(r"([\w.]+(Error|Exception)|error): ", line)]
    # The server repeats the failure of its engine; the root cause was printed by the engine before.
    causes = [line for line in errors if "Engine core initialization failed" not in line]
    return (causes or errors or lines or ["nothing"])[-1]


def reason_of(response: httpx.Response) -> str:
    """Return the message inside vLLM's error answers ({"error": {"message": ...}}), or the start of the body."""
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return str(response.json()["error"]["message"])
    return response.text[:500]


def spread_seed(seed: int) -> int:
    """Return 31 bits out of a seed: vLLM gives sample k the seed + k, so that near seeds would share samples."""
    return int.from_bytes(hashlib.blake2b(str(seed).encode(), digest_size=4).digest(), "little") >> 1


def sample_of(choice: Mapping[str, Any]) -> wire.Sample:
    """Return one choice of an answer of /inference/v1/generate."""
    tokens = choice["token_ids"] or []
    content = (choice["logprobs"] or {}).get("content") or []
    versions = tuple(
        wire.VersionSpan(0 if span["version"] == "default" else int(span["version"]), span["start"], span["end"])
        for span in choice["weight_versions"] or []
    )
    return wire.Sample(
        tokens=tuple(tokens),
        logprobs=tuple(entry["logprob"] for entry in content),
        versions=versions,
        finish_reason=choice["finish_reason"],
    )
