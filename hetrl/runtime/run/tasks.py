"""The tasks of a run, as its controller sees them: who draws samples and how, who scores and trains, what learns."""

from __future__ import annotations

from tokenizers import Tokenizer

from hetrl.describe.experiment import Experiment
from hetrl.describe.models import reward_model_of
from hetrl.dispatch import STRETCH_TOKENS, Capacity, Dispatch
from hetrl.runtime.data.chat import Encoder, judged_text_encoder
from hetrl.runtime.data.rewards import Scorer
from hetrl.runtime.rl.learner import Learner, Tasks
from hetrl.runtime.rl.sampling import SamplingSettings
from hetrl.runtime.rl.tasks import Inference, Trainer
from hetrl.runtime.rl.turns import Turns
from hetrl.runtime.run.context import Context
from hetrl.runtime.transport.member import Member
from hetrl.runtime.weights.model_directory import ModelDirectory, ensure_model_directory
from hetrl.workload import (
    ACTOR_GENERATION,
    ACTOR_TRAINING,
    CRITIC_INFERENCE,
    CRITIC_TRAINING,
    REFERENCE_INFERENCE,
    REWARD_INFERENCE,
    TRAINED,
    architecture,
    versions_ahead,
)


def dispatch_of(context: Context) -> Dispatch:
    """Return what deals samples out to the plan's replicas of generation."""
    replicas = zip(context.replicas, context.plan.tasks[ACTOR_GENERATION].replicas, strict=True)
    capacities = {name: Capacity(plan.max_sequences, plan.samples) for name, plan in replicas}
    stretch = max(STRETCH_TOKENS // context.experiment.launch.emulation.tokens_each, 1)
    return Dispatch(capacities, context.experiment.batch.response_tokens, stretch)


def sampling_of(
    experiment: Experiment, encode: Encoder, tokenizer: Tokenizer, scorer: Scorer, stop_tokens: tuple[int, ...]
) -> SamplingSettings:
    """Return how prompts are encoded, sampled and judged."""
    algorithm, batch = experiment.algorithm, experiment.batch
    return SamplingSettings(
        encode=encode,
        tokenizer=tokenizer,
        scorer=scorer,
        reward=experiment.reward,
        stop_tokens=stop_tokens,
        batch_prompts=experiment.prompts,
        samples_per_prompt=algorithm.samples_per_prompt,
        prompt_tokens=batch.prompt_tokens,
        response_tokens=batch.response_tokens,
        temperature=algorithm.temperature,
        seed=experiment.seed,
    )


def tasks_of(context: Context, member: Member) -> Tasks:
    """Return the tasks of the plan, asked by `member`."""
    temperature = context.experiment.algorithm.temperature

    def inference(task: str, what: str) -> Inference | None:
        if task not in context.plan.tasks:
            return None
        shares = {world.address: world.plan.replicas[0].samples for world in context.worlds(task)}
        return Inference(member, task, shares, what, temperature)

    def trainer(model: str, receivers: tuple[str, ...]) -> Trainer:
        task, staleness = TRAINED[model][0], context.experiment.algorithm.max_staleness
        (address,) = context.addresses(task)
        gives_way = bool(versions_ahead(model, staleness))
        return Trainer(member, task, address, receivers, context.plan.weight_sync.encoding, gives_way)

    actor = trainer("actor", context.replicas)
    critics = context.addresses(CRITIC_INFERENCE) if CRITIC_INFERENCE in context.plan.tasks else ()
    return Tasks(
        actor=actor,
        old=Inference(member, ACTOR_TRAINING, {actor.address: 1}, "logprobs", temperature),
        reference=inference(REFERENCE_INFERENCE, "logprobs"),
        reward=inference(REWARD_INFERENCE, "rewards"),
        values=inference(CRITIC_INFERENCE, "values"),
        critic=trainer("critic", critics) if CRITIC_TRAINING in context.plan.tasks else None,
    )


def learner_of(context: Context, tasks: Tasks, turns: Turns, policy: ModelDirectory) -> Learner:
    """Return what trains on the samples of the model in the directory `policy`.

    A reward model reads them in the tokens of its own directory.
    """
    experiment, judged_text = context.experiment, None
    if experiment.reward.has_model:
        model = reward_model_of(experiment)
        scratch = context.directory / "reward-model"
        judge = ensure_model_directory(model, architecture(model.architecture), scratch)
        judged_text = judged_text_encoder(policy.path, judge.path, experiment.data)
    return Learner(
        tasks=tasks,
        turns=turns,
        algorithm=experiment.algorithm,
        pad_token=policy.pad_token,
        reward=experiment.reward,
        critic=experiment.critic,
        judged_text=judged_text,
        steps=experiment.steps,
    )
