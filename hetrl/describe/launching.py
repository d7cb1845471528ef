"""What an experiment says of how its run is started, watched and given up."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from hetrl.describe.yaml_file import AtLeastOne, Positive, Seed, Strict


def _is_time(value: str) -> str:
    if not re.fullmatch(r"\d+:[0-5]\d:[0-5]\d", value):
        raise ValueError(f'"{value}" is not HH:MM:SS')
    return value


def _some_time(value: str) -> str:
    if not seconds_of(value):
        raise ValueError(f'"{value}" is no time at all, and Slurm would take it for one without end')
    return value


Clock = Annotated[str, AfterValidator(_is_time)]


class Emulation(Strict):
    """How engines are emulated: so many of their seconds pass in one of ours, and what is perturbed by how much.

    The time of each micro-batch and of each stretch of decoding, and response lengths, are drawn evenly within the
    share `noise` of what is expected. `bytes_share` is the part of the bytes between processes that is really sent:
    gradients, activations and weights. A token of a text counts as `tokens_each` tokens, of a prompt as of a response.
    """

    speed: Positive = 1.0
    noise: Annotated[float, Field(ge=0, lt=1)] = 0.1
    bytes_share: Annotated[float, Field(gt=0, le=1)] = 1.0
    tokens_each: AtLeastOne = 1
    seed: Seed = 0


class Launch(Strict):
    """How the run is started. Times are HH:MM:SS; `templates` is a directory with the user's own job scripts.

    Jobs that have their nodes wait `queue_timeout` for those of other sites; members may take `gang_timeout` to get
    ready once all are there. The run begins with `start_with`: all, or all but replicas of generation, of which so
    many are enough, and the others come when they can. `patience` is how long a link between sites may be out
    before what needs it fails; `link_patience` has those of single links, by their sites as "alpha-beta". After
    `orphan_timeout` without a word of the controller what it left behind ends. One thing that a rank or a server is
    asked for may take `hang_timeout`, then it counts as dead. A launcher that follows takes a run that failed, or
    whose time was up, up again, up to `restarts` times. `poll_seconds` is how often a Slurm site is looked at.
    Engines that are `emulated` wait as long as the cost model says that real ones compute
    (`hetrl.runtime.emulated`).
    """

    executor: Literal["auto", "local", "slurm"] = "auto"
    engines: Literal["real", "emulated"] = "real"
    emulation: Emulation = Emulation()
    walltime: Annotated[Clock, AfterValidator(_some_time)] = "08:00:00"
    queue_timeout: Clock = "00:10:00"
    gang_timeout: Clock = "00:10:00"
    start_with: Literal["all"] | AtLeastOne = "all"
    patience: Clock = "00:10:00"
    link_patience: Mapping[str, Clock] = {}
    orphan_timeout: Clock = "00:30:00"
    hang_timeout: Clock = "00:30:00"
    restarts: Annotated[int, Field(ge=0)] = 0
    templates: str | None = None
    poll_seconds: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 30.0

    @property
    def begins_without(self) -> bool:
        """Return whether the run may begin before all rollouts are there."""
        return self.start_with != "all"

    @property
    def walltime_seconds(self) -> int:
        """Return how long a job may run."""
        return seconds_of(self.walltime)

    @property
    def queue_timeout_seconds(self) -> int:
        """Return how long jobs that have their nodes wait for those of other sites in the queue."""
        return seconds_of(self.queue_timeout)

    @property
    def gang_timeout_seconds(self) -> int:
        """Return how long members may take to get ready once all are there."""
        return seconds_of(self.gang_timeout)

    @property
    def start_seconds(self) -> int:
        """Return how long the start may take whoever is there first."""
        return self.queue_timeout_seconds + self.gang_timeout_seconds

    @property
    def orphan_timeout_seconds(self) -> int:
        """Return how long a member goes on without a word of the controller."""
        return seconds_of(self.orphan_timeout)

    @property
    def hang_timeout_seconds(self) -> int:
        """Return how long one pass, optimiser step or stretch of a sample may take."""
        return seconds_of(self.hang_timeout)

    @property
    def emulates(self) -> bool:
        """Return whether nothing is computed."""
        return self.engines == "emulated"

    @model_validator(mode="after")
    def _emulation_is_of_emulated_engines(self) -> Launch:
        if not self.emulates and self.emulation != Emulation():
            raise ValueError("emulation is for engines: emulated; leave it out, or say that")
        return self

    @model_validator(mode="after")
    def _patience_comes_first(self) -> Launch:
        longest = max((self.patience, *self.link_patience.values()), key=seconds_of)
        for key, reason in (
            ("orphan_timeout", "what lies behind a link that is out would end before the link is given up"),
            ("hang_timeout", "a step that waits for a link would count as hanging"),
        ):
            if seconds_of(own := getattr(self, key)) <= seconds_of(longest):
                raise ValueError(f"{key} ({own}) must be longer than the patience with any link ({longest}): {reason}")
        return self

    def patience_seconds(self, site: str, other: str) -> int:
        """Return how long the link between two sites may be out; 0 within a site."""
        if site == other:
            return 0
        names = (link_name(site, other), link_name(other, site))
        own = [self.link_patience[name] for name in names if name in self.link_patience]
        return seconds_of(own[0] if own else self.patience)


def link_name(site: str, other: str) -> str:
    """Return what the link between two sites is called, in either order."""
    return f"{site}-{other}"


def seconds_of(clock: str) -> int:
    """Return the seconds of HH:MM:SS."""
    hours, minutes, seconds = (int(part) for part in clock.split(":"))
    return hours * 3600 + minutes * 60 + seconds
