"""A keeper moves checkpoints between sites: it says which lie at its own, hands out their files, and takes them in.

    controller: LendCheckpoint(task, step, to) to the source, then TakeCheckpoint(task, step, source) to the other one
        ListCheckpoint at the source                       its files and their bytes, held against what a model can have
        ReadCheckpoint, some parts under way at a time     behind all other traffic between the sites
        prove                                              every file has the digest with which it was written
    CheckpointTaken

Who takes asks for each part, so a source holds nothing for others, and one that hangs costs the copy alone. It gives
nothing to whom the controller did not name. A keeper lives in the process of a member of its site; nothing that it
meets ends that.
"""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hetrl.errors import HetrlError
from hetrl.runtime import wire
from hetrl.runtime.checkpoints import files, writing
from hetrl.runtime.checkpoints.places import CheckpointPlaces
from hetrl.runtime.transport.member import Envelope, Member
from hetrl.workload import TRAININGS

PART_BYTES = 4 * 2**20
PARTS = 8  # under way: 32 MiB are 1 Gbps over a round trip of 250 ms
PART_SECONDS = 300.0
MOST_FILES = 100_000
PER_PARAMETER_BYTES, SLACK_BYTES = 24, 2**30  # a checkpoint has 14 per parameter, a tokenizer, and indices

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Room:
    """What a keeper takes in at most: the bytes of one checkpoint, and how many stay (see `keep_last`)."""

    most_bytes: int
    keep: int
    keep_gb: float | None = None


def room_of(parameters: int, keep: int, keep_gb: float | None) -> Room:
    """Return the room for checkpoints of a model of so many parameters."""
    return Room(PER_PARAMETER_BYTES * parameters + SLACK_BYTES, keep, keep_gb)


class Keeper:
    """Answers for the checkpoints of one site; `places` has those of each task."""

    def __init__(self, member: Member, places: Callable[[str], CheckpointPlaces], room: Room) -> None:
        self._member, self._places, self._room = member, places, room
        self._listed: dict[tuple[str, int], Path] = {}
        self._lent = set[tuple[str, int, str]]()  # of each checkpoint, to whom
        self._reading, self._taking = asyncio.Semaphore(PARTS), asyncio.Lock()

    async def serve(self) -> None:
        """Answer until the member is closed."""
        async with asyncio.TaskGroup() as answers:
            while True:
                answers.create_task(self._answer(await self._member.receive()))

    async def _answer(self, envelope: Envelope) -> None:
        """Answer one message; what fails is an answer, whatever was asked for: others ask here, too."""
        buffers: list[bytes] = []
        try:
            match envelope.message:
                case wire.FindCheckpoints(task=task):
                    found = await asyncio.to_thread(self._of(task).find)
                    answer: wire.Message = wire.FoundCheckpoints(steps=tuple(found))
                case wire.LendCheckpoint(task=task, step=step, to=to):
                    self._lent.add((task, step, to))
                    answer = wire.Done()
                case wire.ListCheckpoint() as asked:
                    self._check_lent(asked, envelope)
                    answer = wire.CheckpointListed(files=await asyncio.to_thread(self._list, asked))
                case wire.ReadCheckpoint() as asked:
                    self._check_lent(asked, envelope)
                    async with self._reading:
                        buffers = [await asyncio.to_thread(self._read, asked)]
                        await self._member.reply(envelope, wire.CheckpointRead(), buffers)
                    return
                case wire.TakeCheckpoint() as asked:
                    async with self._taking:
                        answer = await self._take(asked)
                case _:
                    return
        except Exception as error:
            log.warning("%s: %s", self._member.address, error, exc_info=not isinstance(error, HetrlError | OSError))
            answer = wire.Failed(cause=str(error), exit_code=1)
        with suppress(HetrlError):  # who asked is gone, or the run is over
            await self._member.reply(envelope, answer)

    def _of(self, task: str) -> CheckpointPlaces:
        if task not in TRAININGS:
            raise HetrlError(f"{task}: no task that has checkpoints")
        return self._places(task)

    # ---- giving

    def _check_lent(self, asked: wire.ListCheckpoint | wire.ReadCheckpoint, envelope: Envelope) -> None:
        to = envelope.header.source
        if (asked.task, asked.step, to) not in self._lent:
            raise HetrlError(f"the checkpoint of {asked.task} after step {asked.step} is not lent to {to}")

    def _list(self, asked: wire.ListCheckpoint) -> dict[str, int]:
        found = self._of(asked.task).find().get(asked.step)
        if found is None:
            raise HetrlError(f"no whole checkpoint of {asked.task} after step {asked.step} is here")
        self._listed[asked.task, asked.step] = found
        sizes: dict[str, int] = json.loads((found / files.COMPLETE).read_text(encoding="utf-8"))
        return {**sizes, files.COMPLETE: (found / files.COMPLETE).stat().st_size}

    def _read(self, asked: wire.ReadCheckpoint) -> bytes:
        directory = self._listed.get((asked.task, asked.step))
        if directory is None or not _plain(asked.file) or not 0 < asked.bytes <= PART_BYTES or asked.offset < 0:
            raise HetrlError(f"{asked.file}: not of a checkpoint that was listed")
        with (directory / asked.file).open("rb") as file:
            file.seek(asked.offset)
            return file.read(asked.bytes)

    # ---- taking

    async def _take(self, asked: wire.TakeCheckpoint) -> wire.CheckpointTaken:
        """Bring a checkpoint here; it has its name once it is proven, and nothing of it stays otherwise."""
        start, places = time.monotonic(), self._of(asked.task)
        if asked.step in await asyncio.to_thread(files.whole, places.own):
            return wire.CheckpointTaken(step=asked.step, bytes=0, seconds=0.0)
        sizes = await self._sizes(asked)
        target = places.written(asked.step)
        await asyncio.to_thread(self._begin, target, sum(sizes.values()))
        try:
            for name, size in sizes.items():
                await self._fetch(asked, target, name, size)
            await asyncio.to_thread(writing.prove, target)
            await asyncio.to_thread(writing.give_name, target)
        except BaseException:
            writing.discard(target)
            raise
        await asyncio.to_thread(files.keep_last, places.own, self._room.keep, self._room.keep_gb, asked.spared)
        seconds = time.monotonic() - start
        return wire.CheckpointTaken(step=asked.step, bytes=sum(sizes.values()), seconds=seconds)

    async def _sizes(self, asked: wire.TakeCheckpoint) -> dict[str, int]:
        """Ask for the files of a checkpoint; raises HetrlError for what no checkpoint of this model is."""
        listing = wire.ListCheckpoint(task=asked.task, step=asked.step)
        reply = await self._member.request(
            asked.source, listing, timeout_seconds=PART_SECONDS, doing=f"list the checkpoint of step {asked.step}"
        )
        assert isinstance(reply.message, wire.CheckpointListed)
        sizes = reply.message.files
        if not {files.COMPLETE, files.DIGESTS, files.STATE} <= sizes.keys() or not all(map(_plain, sizes)):
            raise HetrlError(f"{asked.source}: what it lists is no checkpoint")
        if len(sizes) > MOST_FILES or min(sizes.values()) < 0 or sum(sizes.values()) > self._room.most_bytes:
            raise HetrlError(
                f"{asked.source}: lists {len(sizes)} files of {sum(sizes.values()) / 1e9:.1f} GB, more than a "
                f"checkpoint of this model has ({self._room.most_bytes / 1e9:.1f} GB)"
            )
        return sizes

    def _begin(self, target: Path, wanted_bytes: int) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(target.parent).free
        if free < wanted_bytes:
            raise HetrlError(
                f"{target.parent.absolute()}: {free / 1e9:.1f} GB are free, the copy of a checkpoint has "
                f"{wanted_bytes / 1e9:.1f}; make room, or name another site in checkpoints.copy_to"
            )
        writing.begin(target)

    async def _fetch(self, asked: wire.TakeCheckpoint, target: Path, name: str, size: int) -> None:
        """Bring one file, some parts of it under way at a time."""
        writer = await asyncio.to_thread(writing.Writer, files.partial_of(target) / name)
        under_way: deque[asyncio.Task[memoryview]] = deque()
        try:
            for offset in range(0, size, PART_BYTES):
                part = wire.ReadCheckpoint(
                    task=asked.task, step=asked.step, file=name, offset=offset, bytes=min(PART_BYTES, size - offset)
                )
                under_way.append(asyncio.create_task(self._part(asked.source, part)))
                if len(under_way) == PARTS:
                    await asyncio.to_thread(writer.add, await under_way.popleft())
            while under_way:
                await asyncio.to_thread(writer.add, await under_way.popleft())
            await asyncio.to_thread(writer.finish)
        finally:
            for task in under_way:
                task.cancel()
            await asyncio.gather(*under_way, return_exceptions=True)
            writer.close()

    async def _part(self, source: str, part: wire.ReadCheckpoint) -> memoryview:
        doing = f"read {part.file} of the checkpoint of step {part.step}"
        reply = await self._member.request(source, part, timeout_seconds=PART_SECONDS, doing=doing)
        if len(reply.buffers) != 1 or reply.buffers[0].nbytes != part.bytes:
            raise HetrlError(f"{source}: sent something else than {part.bytes} bytes ({doing})")
        return reply.buffers[0]


def _plain(name: str) -> bool:
    """Whether a name is that of a file in the directory itself."""
    inside = name.isprintable() and Path(name).name == name and not name.startswith(".")
    return inside and not name.endswith((files.PARTIAL, writing.BESIDE))
