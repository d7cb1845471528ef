"""A batch on its way through the tasks of a step, and what came of it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hetrl.runtime import wire
from hetrl.runtime.rl.sampling import PromptGroup
from hetrl.runtime.wire.arrays import Arrays

Actor = tuple[dict[str, float], int, asyncio.Future[wire.Published | None]]  # what it measured; see `Trained`
Scored = tuple[tuple[PromptGroup, ...], Arrays]
Valued = tuple[Arrays, dict[str, float]]


def future() -> asyncio.Future[Any]:
    """Return what somebody will set."""
    made: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    return made


@dataclass(frozen=True)
class Batch:
    """A batch on its way: the arrays that are asked about, the seconds of its tasks.

    `scored`: its groups with their rewards, its arrays with what all but the actor's trainer say; `valued`: those with
    advantages, which say all that the critic's training reads, and what is worth watching in them.
    """

    step: int
    arrays: Arrays
    warms_up: bool  # the critic does, and the actor stays as it is
    seconds: dict[str, float]
    scored: asyncio.Future[Scored] = field(default_factory=future)
    valued: asyncio.Future[Valued] = field(default_factory=future)


@dataclass(frozen=True)
class Prepared:
    """A batch that can be trained on: its groups were there at `ready`; its `actor` is at it; what else is told."""

    batch: Batch
    groups: tuple[PromptGroup, ...]
    ready: float
    told: dict[str, float]
    actor: asyncio.Future[Actor]


@dataclass(frozen=True)
class Trained:
    """What training on a batch measured, by the weight `version` that it began with; what it gave is under way."""

    prepared: Prepared
    start: float
    version: int
    measured: Mapping[str, float]
    turn_seconds: float
    actor: asyncio.Future[wire.Published | None]  # None: the critic warms up
    critic: asyncio.Future[wire.Published] | None
