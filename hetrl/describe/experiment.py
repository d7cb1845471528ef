"""What an experiment file (`configs/*.yaml`) says: what to train, on which sites, and how to plan and launch it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from hetrl.describe.algorithm import AlgorithmSection, Decay, scheduled
from hetrl.describe.launching import Launch
from hetrl.describe.response_lengths import ResponseLengths
from hetrl.describe.yaml_file import AtLeastOne, Name, Positive, Seed, Strict

Finite = Annotated[float, Field(allow_inf_nan=False)]
MOST_SAMPLES = 2**20  # the planner's tables have a row of so many numbers for each kind of replica


class Model(Strict):
    """The policy: a catalogue name or a directory with a Hugging Face config.json.

    `weights` is a directory with safetensors; without it the weights are drawn from `seed`.
    """

    architecture: str
    weights: str | None = None
    seed: Seed = 0
    dtype: Literal["bf16", "fp32"] = "bf16"


class Overlong(Strict):
    """What a response loses that comes within so many tokens of the longest one: up to `penalty`, evenly."""

    buffer_tokens: AtLeastOne
    penalty: Positive = 1.0


class Reward(Strict):
    """A rule (no GPU), a reward model, or both.

    `rule_scale` x what the rule says + `model_scale` x (what the model says - `model_offset`). `unscorable` is what the
    rule says of a response that it cannot judge, `deadline_seconds` the CPU time to compare one answer, `workers` the
    processes that do so.
    """

    kind: Literal["rule", "model", "both"] = "rule"
    architecture: str | None = None
    weights: str | None = None
    rule_scale: Finite = 1.0
    model_scale: Finite = 1.0
    model_offset: Finite = 0.0
    rule: Literal["auto", "exact", "math"] = "auto"
    unscorable: Finite = 0.0
    deadline_seconds: Positive = 5.0
    workers: AtLeastOne = 2
    overlong: Overlong | None = None

    @model_validator(mode="after")
    def _model_has_architecture(self) -> Reward:
        if self.has_model != (self.architecture is not None):
            raise ValueError("architecture goes with kind model or both, and only with them")
        for key in () if self.has_model else self.changed("weights", "model_scale", "model_offset"):
            raise ValueError(f"{key} is of the reward model, which kind rule has not: leave it out")
        if self.kind == "model" and self.changed("rule_scale"):
            raise ValueError("rule_scale is for kind rule or both: leave it out")
        return self

    @property
    def rule_share(self) -> float:
        """Return by what the rule's reward counts: not at all where the model alone decides."""
        return 0.0 if self.kind == "model" else self.rule_scale

    @property
    def has_model(self) -> bool:
        """Return whether a reward model takes part."""
        return self.kind != "rule"


class Critic(Strict):
    """The value model of PPO; by default the actor's architecture.

    It starts from `weights`, or from those of the actor or the reward model. Until `warmup_steps` steps are done it is
    trained alone.
    """

    architecture: str | None = None
    weights: str | None = None
    start: Literal["actor", "reward"] | None = None
    learning_rate: Positive = 1e-5
    learning_rate_warmup: Annotated[int, Field(ge=0)] = 0
    learning_rate_decay: Decay = "none"
    value_clip: Positive | None = 0.2
    warmup_steps: Annotated[int, Field(ge=0)] = 0

    def learning_rate_at(self, step: int, steps: int) -> float:
        """Return the learning rate of the critic's first, second, ... of so many steps."""
        return scheduled(self.learning_rate, step, steps, self.learning_rate_warmup, self.learning_rate_decay)

    @model_validator(mode="after")
    def _one_start(self) -> Critic:
        if self.weights is not None and self.start is not None:
            raise ValueError("give either weights or start: both say what the critic starts from")
        return self


class Data(Strict):
    """Where the prompts come from and how they are put to the model."""

    kind: Literal["larger-digit", "arithmetic", "gsm8k", "math", "jsonl"]
    path: str | None = None
    split: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]+$")] = "train"
    seed: Seed = 0
    template: Literal["auto", "chat", "plain"] = "auto"
    system: str | None = None
    instruction: str | None = None
    template_arguments: dict[str, bool | int | float | str] = Field(default_factory=dict)


class Batch(Strict):
    """The size of one iteration; `response_lengths` are what the planner expects of the responses."""

    samples: Annotated[int, Field(ge=1, le=MOST_SAMPLES)]
    prompt_tokens: AtLeastOne
    response_tokens: AtLeastOne
    response_lengths: ResponseLengths = ResponseLengths(kind="fixed")


class WarmStart(Strict):
    """Supervised steps on generated demonstrations until the sampled reward lies in the range; then RL begins."""

    reward: tuple[float, float] = (0.2, 0.3)
    learning_rate: Positive = 1e-3
    samples: AtLeastOne = 64
    steps_per_check: AtLeastOne = 5
    max_steps: AtLeastOne = 500

    @field_validator("reward")
    @classmethod
    def _ordered(cls, value: tuple[float, float]) -> tuple[float, float]:
        if not 0 <= value[0] < value[1] <= 1:
            raise ValueError("the range must be [low, high] with 0 <= low < high <= 1")
        return value


class Checkpoints(Strict):
    """When the trainer writes its whole state to its site's disk; the last step is always written.

    The newest `keep` stay, fewer where they would take more than `keep_gb`, but at least one. Each is copied to the
    first site of `copy_to` that takes part and is another one.
    """

    every_steps: AtLeastOne = 50
    keep: AtLeastOne = 2
    keep_gb: Positive | None = None
    copy_to: tuple[str, ...] = ()


class RolloutFiles(Strict):
    """What is written of the samples: of each step some, for the run's page, and all of them if they are `kept`."""

    shown: Annotated[int, Field(ge=0)] = 4
    kept: bool = False


class TopologySection(Strict):
    """Site files and a links file, or one scenario file; `measured` are files of `hetrl profile` and `hetrl probe`.

    Directories of such files may be named as well.
    """

    sites: tuple[str, ...] = ()
    links: str | None = None
    scenario: str | None = None
    measured: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _one_of_both(self) -> TopologySection:
        if bool(self.sites) == bool(self.scenario):
            raise ValueError("give either sites (and links) or scenario")
        return self


BOUNDS = {  # of the planner -> the objective that a bound is for, and implies
    "max_iteration_seconds": "cost",
    "min_samples_per_second": "cost",
    "budget_per_hour": "cost",
    "budget_gpu_hours": "time-to-result",
}


class Planner(Strict):
    """Who plans, for what (`hetrl.cost.objective`), within which bounds, and for how long.

    With sha-ea a training crosses sites only where it pays, even if each link gives the share `robust` less
    (`hetrl.search.robust`). A bound implies its objective. `min_samples_per_second` bounds the same as
    `max_iteration_seconds`, as a rate.
    """

    solver: str = "sha-ea"
    objective: Literal["throughput", "cost", "time-to-result"] = "throughput"
    max_iteration_seconds: Positive | None = None
    min_samples_per_second: Positive | None = None
    budget_per_hour: Positive | None = None
    budget_gpu_hours: Positive | None = None
    budget_seconds: Positive = 30.0
    evaluations: AtLeastOne | None = None
    seed: Seed = 0
    processes: Annotated[int, Field(ge=1, le=256)] = 1
    robust: Annotated[float, Field(ge=0, lt=1)] = 0.3

    @model_validator(mode="before")
    @classmethod
    def _bound_implies_objective(cls, given: object) -> object:
        if not isinstance(given, dict) or "objective" in given:
            return given
        implied = [objective for key, objective in BOUNDS.items() if given.get(key) is not None]
        return {**given, "objective": implied[0]} if implied else given

    @model_validator(mode="after")
    def _bounds_are_of_the_objective(self) -> Planner:
        bounds = [key for key in BOUNDS if getattr(self, key) is not None]
        for key in bounds:
            if self.objective != BOUNDS[key]:
                others = [other for other in bounds if BOUNDS[other] == self.objective]
                remedy = f"leave out {' and '.join(others)}" if others else "leave the objective out, for it follows"
                raise ValueError(f"{key} is for objective {BOUNDS[key]}, not for {self.objective}: {remedy}")
        if len(bounds) > 1:
            raise ValueError(
                f"give one of {' and '.join(bounds)}: max_iteration_seconds and min_samples_per_second, which say the "
                "same, are for the least cost, budget_per_hour is for the least time"
            )
        return self


class Experiment(Strict):
    """A whole experiment file."""

    name: Name
    model: Model
    algorithm: AlgorithmSection = AlgorithmSection()
    reward: Reward = Reward()
    critic: Critic = Critic()
    data: Data
    batch: Batch
    steps: AtLeastOne
    seed: Seed = 0
    warm_start: WarmStart | None = None
    checkpoints: Checkpoints = Checkpoints()
    rollouts: RolloutFiles = RolloutFiles()
    topology: TopologySection
    planner: Planner = Planner()
    launch: Launch = Launch()

    @property
    def prompts(self) -> int:
        """Return the prompts of a batch."""
        return self.batch.samples // self.algorithm.samples_per_prompt

    @model_validator(mode="after")
    def _whole_groups(self) -> Experiment:
        group, samples = self.algorithm.samples_per_prompt, self.batch.samples
        if samples % group:
            raise ValueError(f"batch.samples ({samples}) must be a multiple of algorithm.samples_per_prompt ({group})")
        if self.prompts % self.algorithm.minibatches:
            raise ValueError(f"algorithm.minibatches must divide the {self.prompts} prompts of an iteration")
        if (overlong := self.reward.overlong) and overlong.buffer_tokens > self.batch.response_tokens:
            raise ValueError(
                f"reward.overlong.buffer_tokens ({overlong.buffer_tokens}) is more than batch.response_tokens "
                f"({self.batch.response_tokens})"
            )
        return self

    @model_validator(mode="after")
    def _models_fit_together(self) -> Experiment:
        if self.critic != Critic() and self.algorithm.kind != "ppo":
            raise ValueError("critic is for algorithm.kind ppo")
        if self.critic.warmup_steps >= self.steps:
            raise ValueError(f"critic.warmup_steps: the actor is trained in none of the {self.steps} steps")
        if self.critic.start == "reward" and not self.reward.has_model:
            raise ValueError("critic.start: there is no reward model to start from; see reward.kind")
        started = {"actor": self.model.architecture, "reward": self.reward.architecture, None: None}[self.critic.start]
        if started and self.critic.architecture not in (None, started):
            raise ValueError(
                f"critic: it starts from the {self.critic.start}, which is {started}, and has the architecture "
                f"{self.critic.architecture}; leave out one of both, or give its own weights"
            )
        if self.launch.emulates and (self.warm_start is not None or self.algorithm.dynamic_sampling):
            raise ValueError(
                "launch.engines: emulated engines learn nothing, so that neither warm_start nor "
                "algorithm.dynamic_sampling would come to an end; leave both out"
            )
        if self.algorithm.dynamic_sampling and self.reward.has_model:
            raise ValueError(
                "algorithm.dynamic_sampling decides on rewards as samples come back, and a reward model scores whole "
                "batches later: use reward.kind rule, or leave it out"
            )
        return self
