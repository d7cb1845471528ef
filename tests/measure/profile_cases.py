"""Measured files as the tests need them."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from hetrl.describe.measured import Measured, Measurement

WHEN = datetime(2026, 11, 2, 9, 30, tzinfo=UTC)


def measured(**changes: Any) -> Measured:
    values: dict[str, Any] = {
        "gpu": "a100-80gb",
        "measured_at": WHEN,
        "command": "hetrl profile",
        "machine": {"host": "node1", "device": "NVIDIA A100-SXM4-80GB", "devices": 1, "memory_gb": 85.0},
        "software": {"torch": "2.13.0"},
        "measurements": (Measurement("copy", {"direction": "inside", "bytes": 8}, "bytes", 16.0, 1, (0.5, 1.0, 2.0)),),
        "shares": {"decode": 0.6, "prefill": 0.5, "training": 0.4},
    }
    return Measured(**{**values, **changes})


def layer(kind: str, batch: int, tokens: int, seconds: float = 1.0, use: str = "fit", **question: Any) -> Measurement:
    length = "context" if kind == "decode layer" else "sequence"
    asked = {"architecture": "qwen3-8b", "dtype": "bf16", "batch": batch, length: tokens, **question}
    return Measurement(kind, asked, "flops", 1.0, 1, (seconds,), use)
