"""How the ranks of one training world are arranged: tensor, data and pipeline parallelism, with unequal shares."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from hetrl.errors import HetrlError


class Coordinates(NamedTuple):
    """Where a rank stands: its replica (data), stage (pipeline) and index among the stage's devices (tensor)."""

    replica: int
    stage: int
    tensor_index: int


@dataclass(frozen=True)
class Layout:
    """The grid of one world: `tensor` x replicas x stages ranks.

    `stages` are the half-open ranges of global layers of the pipeline stages, in order and without gap; `samples` is
    what each replica takes of a batch, in proportion; replicas may be unequal. Raises HetrlError for anything else.
    """

    tensor: int
    stages: tuple[tuple[int, int], ...]
    samples: tuple[int, ...]
    micro_batch: int

    def __post_init__(self) -> None:
        if self.tensor < 1 or self.micro_batch < 1:
            raise HetrlError(f"layout: tensor {self.tensor} and micro_batch {self.micro_batch} must be at least 1")
        if not self.samples or any(share < 1 for share in self.samples):
            raise HetrlError(f"layout: samples {self.samples} must be positive, one per replica")
        expected = 0
        for start, end in self.stages:
            if start != expected or end <= start:
                raise HetrlError(f"layout: stages {self.stages} must be non-empty layer ranges from 0 without gaps")
            expected = end
        if not self.stages:
            raise HetrlError("layout: at least one stage is needed")

    @property
    def data(self) -> int:
        """Return the number of data-parallel replicas."""
        return len(self.samples)

    @property
    def pipeline(self) -> int:
        """Return the number of pipeline stages."""
        return len(self.stages)

    @property
    def layers(self) -> int:
        """Return the number of layers of the whole model."""
        return self.stages[-1][1]

    @property
    def world_size(self) -> int:
        """Return the number of ranks."""
        return self.tensor * self.data * self.pipeline

    def rank_of(self, replica: int, stage: int, tensor_index: int) -> int:
        """Return the rank at a place: tensor fastest, then data, then pipeline.

        This is the default order "tp-cp-ep-dp-pp" of megatron.core.parallel_state.initialize_model_parallel. Raises
        HetrlError for a place outside the grid.
        """
        place = (replica, stage, tensor_index)
        if not all(0 <= i < n for i, n in zip(place, (self.data, self.pipeline, self.tensor), strict=True)):
            raise HetrlError(f"layout: no rank at replica {replica}, stage {stage}, tensor index {tensor_index}")
        return tensor_index + self.tensor * (replica + self.data * stage)

    def coordinates(self, rank: int) -> Coordinates:
        """Return the place of a rank; the inverse of `rank_of`. Raises HetrlError for a rank outside the world."""
        if not 0 <= rank < self.world_size:
            raise HetrlError(f"layout: rank {rank} is not in a world of {self.world_size}")
        rest, tensor_index = divmod(rank, self.tensor)
        stage, replica = divmod(rest, self.data)
        return Coordinates(replica, stage, tensor_index)
