"""Shares of the data sheet for a type and phase that nobody measured, from those of other types.

    decode     the share of the calibrated type with the nearest memory: controllers of one kind lose alike
    prefill,   Ampere, Volta: the A100's share
    training   Ada, Hopper: the same, but no more than the board's power feeds: the share of the calibrated board of the
               kind that its power holds back x (watts per peak / those of that board)^(1/3)

The cap is physics: dense products run at the data sheet's rate only where the power limit feeds them. An A100 (1.3 W
per TFLOPS) is not held back, an L4 (0.6 W) and an L40S (1.0 W) are, and so is an H100 (0.7 W). A board that is held
back lowers its clock and with it the voltage; dynamic power is proportional to clock x voltage squared, so the clock to
the cube root of the power. Where the calibrated board lacks the phase, its other one counts, times the ratio between
the two on the A100.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from hetrl.gpus import GpuType, gpu_type, is_cpu

Shares = Mapping[str, Mapping[str, float]]  # {GPU type: {phase: share}}
CPU = 0.5  # in every phase: as much an estimate as the catalogue's row


@dataclass(frozen=True)
class _Board:
    """`kind` of architecture, calibrated type with the `nearest` memory, power limit (the vendor's data sheet)."""

    kind: str
    nearest: str
    watts: float


_A100 = "a100-40gb"  # has a point in every phase, and power to spare
_HELD_BACK = {  # boards of a kind that their power holds back, by the phase in which they are calibrated
    "ada": {"prefill": "l4", "training": "l40s"},
    "hopper": {"prefill": "h100", "training": "h100"},
}
_BOARDS = {
    "a100-40gb": _Board("ampere", "a100-80gb", 400),
    "a100-80gb": _Board("ampere", "a100-40gb", 400),
    "a100-hetrl": _Board("ampere", "a100-80gb", 400),
    "a40": _Board("ampere", "l4", 300),  # GDDR6, like L4
    "a10g": _Board("ampere", "l4", 150),
    "l4": _Board("ada", "l4", 72),
    "l40": _Board("ada", "l4", 300),
    "l40s": _Board("ada", "l4", 350),
    "rtx-4090": _Board("ada", "l4", 450),
    "h100": _Board("hopper", "a100-80gb", 700),  # HBM, like A100
    "h200": _Board("hopper", "h100", 700),
    "gh200": _Board("hopper", "h100", 700),
    "h20": _Board("hopper", "h100", 400),
    # Made in processes of the same family, and with HBM: 4NP, 4NP and N5.
    "b200": _Board("hopper", "h100", 1000),
    "gb200": _Board("hopper", "h100", 1200),
    "mi300x": _Board("hopper", "h100", 750),
    "v100": _Board("volta", "a100-40gb", 300),
}


def inferred_share(shares: Shares, entry: GpuType, phase: str) -> float:
    """Return the share that a type reaches in a phase, from the calibrated shares of others.

    A type that is described `like` another has that one's.
    """
    if is_cpu(entry.name):
        return CPU
    if entry.like:
        return shares.get(entry.like, {}).get(phase) or inferred_share(shares, gpu_type(entry.like), phase)
    board = _BOARDS.get(entry.name, _BOARDS[_A100])
    if phase == "decode":
        return shares[board.nearest][phase]
    return min(shares[_A100][phase], _fed(shares, board, phase, entry.peak_tflops))


def _fed(shares: Shares, board: _Board, phase: str, peak_tflops: float) -> float:
    """Return the share that the power of a board feeds; infinite where its kind is never short of it."""
    boards = _HELD_BACK.get(board.kind, {})
    known = {own: held for own, held in boards.items() if own in shares.get(held, {})}
    if not known:
        return math.inf
    own = phase if phase in known else next(iter(known))
    reached = shares[known[own]][own] * shares[_A100][phase] / shares[_A100][own]
    watts = _BOARDS[known[own]].watts / gpu_type(known[own]).peak_tflops
    return float(reached * (board.watts / peak_tflops / watts) ** (1 / 3))
