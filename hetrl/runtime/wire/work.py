"""What the tasks of a run do for each other: samples, scores and training."""

from __future__ import annotations

import msgspec

from hetrl.runtime.wire.header import ArraySpec, Tagged

# What asks for a generation, a score, an optimiser step, a checkpoint or new weights waits for so long.
WORK_SECONDS = 86400.0  # what hangs ends before, by `launch.hang_timeout`

# ---- rollouts


class Sampling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to sample: `samples` continuations of at most `max_tokens`, ended by any of `stop_tokens`; seeded."""

    samples: int
    max_tokens: int
    temperature: float
    top_p: float
    seed: int
    stop_tokens: tuple[int, ...] = ()


class Generate(Tagged, frozen=True, tag=True):
    """Sample continuations of one prompt; token ids in, token ids out. `draw` numbers what a controller asks for.

    Where the prompt ends with tokens of the sample itself, these were drawn `since` that weight version.
    """

    draw: int
    prompt: tuple[int, ...]
    sampling: Sampling
    since: int | None = None


class VersionSpan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Tokens [start, end) of a sample were drawn under this weight version."""

    version: int
    start: int
    end: int


class Sample(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One continuation: tokens, their log-probs under the sampling engine and the weight version of each token."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[VersionSpan, ...]
    finish_reason: str  # stop | length | abort


class Generated(Tagged, frozen=True, tag=True):
    """The samples of one `Generate`, and how long the server took."""

    samples: tuple[Sample, ...]
    seconds: float


class Withdraw(Tagged, frozen=True, tag=True):
    """Nobody wants the samples of a `Generate` any more; it is not answered."""

    draw: int


# ---- scoring and training (arrays travel as buffers in the order of `arrays`)


class Score(Tagged, frozen=True, tag=True):
    """Log-probs, values or rewards of each sequence; arrays tokens [n, s] and lengths [n]; answered by `Scored`."""

    step: int
    what: str  # logprobs | values | rewards, as the engine's `score` says
    arrays: tuple[ArraySpec, ...]
    temperature: float = 1.0


class Scored(Tagged, frozen=True, tag=True):
    """Array scores [n, s], zero where a sequence has no token; `version`: of the weights that arrived (0: none did)."""

    step: int
    arrays: tuple[ArraySpec, ...]
    seconds: float
    version: int


class LossSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The loss of one optimiser step and its coefficients (`hetrl.runtime.rl.losses`, whose `check` takes them).

    Without a `learning_rate` the optimiser's own counts. `loss` supervised has no coefficients, value, of a critic, has
    `value_clip` alone. With `first_step` the
    weights are still those that the ratio is to, so that the step's own log-probs stand for the old ones; `correction`
    (with its cap and bounds) then weighs each token by them over the sampler's.
    """

    loss: str = "policy"  # policy | supervised | value
    learning_rate: float | None = None
    temperature: float = 1.0
    ratio: str = "token"  # token | sequence
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    kl_coefficient: float = 0.0
    kl_estimator: str = "k3"
    entropy_coefficient: float = 0.0
    first_step: bool = False
    correction: str | None = None  # none | truncate | mask: the bound of the weights; None: no weights
    correction_cap: float = 2.0
    correction_bounds: tuple[float, float] = (0.5, 5.0)
    value_clip: float | None = None


class Train(Tagged, frozen=True, tag=True):
    """One optimiser step on one minibatch; answered by `Trained`."""

    step: int
    settings: LossSettings
    arrays: tuple[ArraySpec, ...]


class Save(Tagged, frozen=True, tag=True):
    """To a trainer: copy the state after this step of the run and write it beside the next; answered by `Saved`.

    `progress` is what the controller needs to go on from there, and the buffer has the samples under way; the trainer
    keeps both and reads neither.
    """

    step: int
    version: int
    progress: str = ""


class FinishSave(Tagged, frozen=True, tag=True):
    """To a trainer: complete the checkpoint of this step, then keep the newest `keep`; answered by `Saved`.

    Fewer are kept where they would take more than `keep_gb`; those of the steps `spared` are, too. Without `wait` only
    when all ranks have written their files already.
    """

    step: int
    keep: int
    wait: bool
    keep_gb: float | None = None
    spared: tuple[int, ...] = ()


class Saved(Tagged, frozen=True, tag=True):
    """How far a checkpoint is: the trainer has copied it (not `whole`), or it is on its disk.

    `directory` is its place in the directory of the trainer's site; in these `seconds` the trainer did nothing else.
    """

    step: int
    directory: str
    seconds: float
    whole: bool


class Restore(Tagged, frozen=True, tag=True):
    """To a trainer: take up the checkpoint of this step; answered by `Restored`."""

    step: int


class Restored(Tagged, frozen=True, tag=True):
    """A checkpoint is taken up; what `Save` said of it, the samples in the buffer."""

    step: int
    version: int
    progress: str


class Trained(Tagged, frozen=True, tag=True):
    """What the step measured (loss, gradient norm, KL, clip fraction, ...)."""

    step: int
    metrics: dict[str, float]
    seconds: float


# ---- turns on devices that tasks of one group share


class Sleep(Tagged, frozen=True, tag=True):
    """To a task: leave your devices to another one until `Wake`; answered by `Done` when they are free.

    `idle_state` is the plan's. Without `keep_weights` they will be replaced before they are used again.
    """

    idle_state: str  # resident | offload | sleep
    keep_weights: bool


class Wake(Tagged, frozen=True, tag=True):
    """To a task: the devices are yours; answered by `Done` when it can work. The first one asks it to start."""


WorkMessage = (
    Generate
    | Generated
    | Withdraw
    | Score
    | Scored
    | Train
    | Save
    | FinishSave
    | Saved
    | Restore
    | Restored
    | Trained
    | Sleep
    | Wake
)
