"""The newest weights at the replicas that draw: who is in step gets each version as it is published, others beside.

publish     the next version, to all that have the one before; who misses it (its link is out, it takes too long) is
            behind, and draws nothing
catch_up    those that are behind, or were started again, site by site, at their own pace; no version waits for it
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Protocol

from hetrl.errors import HetrlError
from hetrl.runtime import wire
from hetrl.runtime.rl.draws import Draws
from hetrl.runtime.rl.learner import Versions
from hetrl.runtime.rl.tasks import Trainer

RETURN_TRIES = 3
PATIENCE = 2.0  # times what a plan counts on for a version, before the run goes on without those that lack it
LEAST_PATIENCE_SECONDS = 20.0  # small versions wait for an engine that loads them


class Told(Protocol):
    """Who notes what becomes of versions; `Record` says what each is."""

    def published(self, published: wire.Published) -> None:
        """Note a version."""

    def replicas_behind(self, version: int, causes: Mapping[str, str]) -> None:
        """Note who missed a version."""

    def replicas_caught_up(self, published: wire.Published) -> None:
        """Note who has the newest version again."""


class Serving:
    """Publishes the actor's weights; `planned_seconds` is what the plan counts on for a version."""

    def __init__(self, actor: Trainer, draws: Draws, versions: Versions, told: Told, planned_seconds: float) -> None:
        self._actor, self._draws, self._versions, self._told = actor, draws, versions, told
        self._patience_seconds = max(PATIENCE * planned_seconds, LEAST_PATIENCE_SECONDS)
        self._tries = Counter[str]()  # replicas that were started again: how often they may fail to take a version
        self._lives = Counter[str]()  # of each replica, how often it was started again
        self._coming: set[str] = set()  # replicas that are being brought to the newest version

    def back(self, replica: str) -> None:
        """Let a replica take part that was started again; what was on its way to its life before may still fail."""
        self._lives[replica] += 1
        self._tries[replica] = RETURN_TRIES
        self._draws.back(replica)

    async def publish(self, left: asyncio.Event | None = None) -> wire.Published:
        """Make the actor's current weights the next version at every replica in step; who does not take them is lost.

        Called with the actor's lock, in its trainer's turn until it has set `left`.
        """
        self._versions.actor += 1
        version, to, lives = self._versions.actor, self._draws.in_step, self._lives.copy()
        quorum = min(1, len(to))
        await self._actor.export(version, to, quorum=quorum, patience_seconds=self._patience_seconds)
        if left is not None:
            left.set()
        published = await self._actor.published(version, quorum=quorum)
        self._note(published, lives)
        if published.left_out:
            self._told.replicas_behind(version, published.left_out)
        self._told.published(published)
        return published

    async def catch_up(self) -> None:
        """Bring replicas that are behind to the newest version, for as long as the run lasts."""
        works = set[asyncio.Task[None]]()
        try:
            while True:
                works.add(waiting := asyncio.create_task(self._some_behind()))
                done, _ = await asyncio.wait(works, return_when=asyncio.FIRST_COMPLETED)
                waiting.cancel()
                works -= {waiting, *done}
                for work in done:
                    work.result()
                works |= {asyncio.create_task(self._bring(replicas)) for replicas in self._behind()}
        finally:
            for work in works:
                work.cancel()
            await asyncio.gather(*works, return_exceptions=True)

    async def _some_behind(self) -> None:
        while not self._behind():
            await self._draws.changed()

    def _behind(self) -> list[list[str]]:
        """Return by site who is behind, can be reached and is not being served yet."""
        sites: dict[str, list[str]] = {}
        for replica in self._draws.behind:
            if replica not in self._coming:
                sites.setdefault(wire.site_of(replica), []).append(replica)
        return [*sites.values()]

    async def _bring(self, replicas: Sequence[str]) -> None:
        self._coming |= {*replicas}
        lives = self._lives.copy()
        try:
            published = await self._actor.catch_up(self._versions.actor, replicas)
        finally:
            self._coming -= {*replicas}
        self._note(published, lives)
        if published.version == self._versions.actor:
            self._told.replicas_caught_up(published)

    def _note(self, published: wire.Published, lives: Counter[str]) -> None:
        """Let those draw that have the newest version; who could not take a version is lost.

        What was sent to another of the `lives` of a replica says nothing of it: it stays behind until it is brought.
        """
        restarted = {replica for replica, life in self._lives.items() if life != lives[replica]}
        failed = {replica: cause for replica, cause in published.failed.items() if replica not in restarted}
        applied = [replica for replica in published.apply_seconds if replica not in restarted]
        for replica, cause in failed.items():
            if self._tries[replica] > 0:  # what was on its way to its life before may have come between
                self._tries[replica] -= 1
                self._draws.missed(replica)
            else:
                self._draws.lost(replica, HetrlError(cause))
        for replica in published.left_out:
            self._draws.missed(replica)
        for replica in applied:
            self._tries[replica] = 0
            if published.version == self._versions.actor:
                self._draws.served(replica)
