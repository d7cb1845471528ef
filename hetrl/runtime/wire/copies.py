"""What keepers say of checkpoints: which one a controller wants where, and the files of one on their way there."""

from __future__ import annotations

from hetrl.runtime.wire.header import Tagged


class FindCheckpoints(Tagged, frozen=True, tag=True):
    """To a keeper: which whole checkpoints of a task are there? Answered by `FoundCheckpoints`."""

    task: str


class FoundCheckpoints(Tagged, frozen=True, tag=True):
    """The steps of the whole checkpoints that are there."""

    steps: tuple[int, ...]


class LendCheckpoint(Tagged, frozen=True, tag=True):
    """To a keeper: the keeper `to` may list and read this checkpoint from now on. Answered by `Done`."""

    task: str
    step: int
    to: str


class TakeCheckpoint(Tagged, frozen=True, tag=True):
    """To a keeper: bring the checkpoint of a task from another keeper here, and keep it; answered once it is proven.

    Older ones go then, but for those of the steps `spared`.
    """

    task: str
    step: int
    source: str
    spared: tuple[int, ...] = ()


class CheckpointTaken(Tagged, frozen=True, tag=True):
    """A checkpoint is here, every file as it was written; so many bytes came for it, none where it was here already."""

    step: int
    bytes: int
    seconds: float


class ListCheckpoint(Tagged, frozen=True, tag=True):
    """To a keeper that lends this whole checkpoint: which files has it? Answered by `CheckpointListed`."""

    task: str
    step: int


class CheckpointListed(Tagged, frozen=True, tag=True):
    """The bytes of each file of a checkpoint."""

    files: dict[str, int]


class ReadCheckpoint(Tagged, frozen=True, tag=True):
    """To a keeper that has listed a checkpoint: send `bytes` of one of its files from `offset` on."""

    task: str
    step: int
    file: str
    offset: int
    bytes: int


class CheckpointRead(Tagged, frozen=True, tag=True):
    """What a keeper read, in one buffer."""


CopyMessage = (
    FindCheckpoints
    | FoundCheckpoints
    | LendCheckpoint
    | TakeCheckpoint
    | CheckpointTaken
    | ListCheckpoint
    | CheckpointListed
    | ReadCheckpoint
    | CheckpointRead
)
