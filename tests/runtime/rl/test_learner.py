"""What an iteration of learning asks of the trainer, with answers in its place."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType, SimpleNamespace
from typing import Any, cast

import msgspec
import numpy as np
import pytest

from hetrl.describe.algorithm import AlgorithmSection
from hetrl.describe.experiment import Critic, Reward
from hetrl.errors import HetrlError
from hetrl.runtime import wire
from hetrl.runtime.data.prompts import Prompt
from hetrl.runtime.rl.learner import Learner, Tasks, Versions
from hetrl.runtime.rl.sampling import PromptGroup
from hetrl.runtime.rl.tasks import Inference, Trainer
from hetrl.runtime.rl.turns import Turns
from hetrl.runtime.transport.member import Member
from hetrl.runtime.wire.arrays import Arrays, pack, unpack
from hetrl.workload import (
    ACTOR_TRAINING,
    CRITIC_INFERENCE,
    CRITIC_TRAINING,
    OLD_LOGPROBS,
    REFERENCE_INFERENCE,
    REWARD_INFERENCE,
)

TRAINER, REFERENCE, FASTER = "a/actor_training/0", "a/reference_inference/0", "b/reference_inference/1"
STALE: dict[str, Any] = {"mode": "async", "max_staleness": 1}


def groups(version: int = 1) -> tuple[PromptGroup, ...]:
    spans = (wire.VersionSpan(version=version, start=0, end=2),)
    drawn = [wire.Sample(tokens=(7, 1), logprobs=(-0.5, -0.25), versions=spans, finish_reason="stop")] * 2
    return tuple(PromptGroup(Prompt(name, ""), (5,), tuple(drawn), (1.0, 0.0)) for name in ("q", "r"))


class Answers:
    """Answers as trainers and inferences do and remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, wire.Message, dict[str, Any]]] = []

    async def request(self, to: str, message: Any, buffers: Any = (), **_: Any) -> Any:
        arrays = unpack(message.arrays, list(buffers))
        self.asked.append((to, message, arrays))
        if isinstance(message, wire.Score):
            specs, scores = pack({"scores": np.full(arrays["tokens"].shape, -0.75, np.float32)})
            return SimpleNamespace(message=wire.Scored(step=1, arrays=specs, seconds=0.0, version=0), buffers=scores)
        metrics = {"loss": float(len(self.asked))}
        if "fresh" in arrays:  # sums over the masked tokens, divided by their number
            metrics |= {"mismatch": 0.1, "fresh": float(arrays["fresh"].mean() > 0) / 2}
        return SimpleNamespace(message=wire.Trained(step=1, metrics=metrics, seconds=0.0), buffers=())


async def made(
    learner: Learner, drawn: tuple[PromptGroup, ...], versions: Versions, version: int, seconds: dict[str, float]
) -> tuple[Arrays, Arrays, dict[str, float], tuple[PromptGroup, ...]]:
    """Return what the critic's loss reads of a batch, and the policy's, what is told, its groups with their rewards."""
    read = learner.experience(drawn)
    scored, arrays, told = await learner.scored(read, drawn, 1, versions, seconds)
    old = await learner.old_logprobs(read, 1, seconds)
    valued = learner.valued({**arrays, **old}, scored)
    batch, seen = learner.policy(valued, old, scored, version)
    return valued[0], batch, {**seen, **told}, scored


def learn(
    settings: dict[str, Any],
    version: int = 1,
    reference: Mapping[str, int] = MappingProxyType({}),
    drawn: tuple[PromptGroup, ...] | None = None,
) -> tuple[Answers, dict[str, float], dict[str, float]]:
    trainer, seconds = Answers(), dict[str, float]()
    member = cast(Member, trainer)
    tasks = Tasks(
        actor=Trainer(member, ACTOR_TRAINING, TRAINER, ()),
        old=Inference(member, ACTOR_TRAINING, {TRAINER: 1}),
        reference=Inference(member, REFERENCE_INFERENCE, reference) if reference else None,
    )
    turns = Turns(member, (), new_weights=True)
    learner = Learner(tasks, turns, AlgorithmSection.model_validate(settings), pad_token=0)

    async def both() -> dict[str, float]:
        _, batch, seen, _ = await made(learner, drawn or groups(), Versions(), version, seconds)
        return {**seen, **await learner.train_actor(batch, 1)}

    return trainer, asyncio.run(both()), seconds


@pytest.mark.parametrize("settings", [{}, {"correction": "mask"}, STALE, {**STALE, "objective": "coupled"}])
def test_one_step_is_taken_without_a_pass_over_the_batch(settings: dict[str, Any]) -> None:
    trainer, measured, seconds = learn(settings)
    ((to, message, arrays),) = trainer.asked
    assert to == TRAINER and isinstance(message, wire.Train)
    assert ("old_logprobs" in arrays) != message.settings.first_step
    assert measured["mismatch"] == pytest.approx(0.2)  # the mean over fresh tokens
    assert "fresh" not in measured
    assert not seconds


def test_minibatches_of_truncated_samples_alone_are_skipped(caplog: pytest.LogCaptureFixture) -> None:
    whole, cut = groups()
    cut = replace(cut, samples=tuple(msgspec.structs.replace(one, finish_reason="length") for one in cut.samples))
    settings = {"minibatches": 2, "epochs": 2, "mask_truncated": True}
    trainer, measured, _ = learn(settings, drawn=(cut, whole))
    trained = [arrays for _, message, arrays in trainer.asked if isinstance(message, wire.Train)]
    assert [arrays["mask"].any() for arrays in trained] == [True, True]
    assert "1 minibatches have no token" in caplog.text and "loss" in measured
    trainer, measured, _ = learn(settings, drawn=(cut, cut))
    assert not [message for _, message, _ in trainer.asked if isinstance(message, wire.Train)]
    assert "loss" not in measured and measured["groups_equal"] == 0


def test_without_fresh_tokens_there_is_no_mismatch() -> None:
    _, measured, _ = learn(STALE, version=2)
    assert "mismatch" not in measured and "fresh" not in measured


def test_of_several_steps_the_batch_is_scored_first_and_that_is_part_of_the_training() -> None:
    settings = {"minibatches": 2, "epochs": 2, "kl_coefficient": 0.1}
    trainer, measured, seconds = learn(settings, reference={REFERENCE: 1})
    assert [(to, type(message)) for to, message, _ in trainer.asked] == [
        (REFERENCE, wire.Score),
        (TRAINER, wire.Score),
        *[(TRAINER, wire.Train)] * 4,
    ]
    for _, message, arrays in trainer.asked[2:]:
        assert isinstance(message, wire.Train) and not message.settings.first_step
        assert arrays["old_logprobs"].tolist() == [[-0.75] * 3] * 2
        assert "sampler_logprobs" not in arrays
    assert measured["loss"] == pytest.approx((3 + 4 + 5 + 6) / 4)
    assert measured["mismatch"] == pytest.approx((0.25 + 0.5) / 2)
    assert set(seconds) == {REFERENCE_INFERENCE, OLD_LOGPROBS}


def test_each_world_of_the_reference_scores_its_share() -> None:
    trainer, _, _ = learn({"kl_coefficient": 0.1}, reference={REFERENCE: 1, FASTER: 3})
    scored = {to: arrays["tokens"].shape[0] for to, message, arrays in trainer.asked if isinstance(message, wire.Score)}
    assert scored == {REFERENCE: 1, FASTER: 3}
    (_, _, trained) = trainer.asked[-1]
    assert (trained["reference_logprobs"] == -0.75).all()


def test_a_world_without_a_share_is_not_asked() -> None:
    trainer, _, _ = learn({"kl_coefficient": 0.1}, reference={REFERENCE: 1, FASTER: 1000})
    assert [to for to, message, _ in trainer.asked if isinstance(message, wire.Score)] == [FASTER]


VALUES, REWARD, CRITIC = "a/critic_inference/0", "b/reward_inference/0", "a/critic_training/0"


class Models(Answers):
    """Answers as a whole run of PPO does: the reward model finds each text worth its number of tokens."""

    def __init__(self, version: int = 3) -> None:
        super().__init__()
        self.version = version

    async def request(self, to: str, message: Any, buffers: Any = (), **_: Any) -> Any:
        if not isinstance(message, wire.Score):
            return await super().request(to, message, buffers)
        arrays = unpack(message.arrays, list(buffers))
        self.asked.append((to, message, arrays))
        found = np.full(arrays["tokens"].shape, {VALUES: 0.5, TRAINER: -0.75, REFERENCE: -1.0}.get(to, 0.0), np.float32)
        if to == REWARD:
            found[np.arange(len(found)), arrays["lengths"] - 1] = arrays["lengths"]
        specs, scores = pack({"scores": found})
        version = self.version if to == VALUES else 0
        return SimpleNamespace(message=wire.Scored(step=1, arrays=specs, seconds=0.0, version=version), buffers=scores)


def learner_of(models: Models) -> Learner:
    """Return the learner of a run with all six tasks, whose reward model reads the responses alone."""
    member = cast(Member, models)
    tasks = Tasks(
        actor=Trainer(member, ACTOR_TRAINING, TRAINER, ()),
        old=Inference(member, ACTOR_TRAINING, {TRAINER: 1}),
        reference=Inference(member, REFERENCE_INFERENCE, {REFERENCE: 1}),
        reward=Inference(member, REWARD_INFERENCE, {REWARD: 1}, "rewards"),
        values=Inference(member, CRITIC_INFERENCE, {VALUES: 1}, "values"),
        critic=Trainer(member, CRITIC_TRAINING, CRITIC, ()),
    )
    algorithm = {"kind": "ppo", "kl_coefficient": 0.5, "kl_in": "reward", "kl_estimator": "k1", "trace": 1.0}
    return Learner(
        tasks,
        Turns(member, (), new_weights=True),
        AlgorithmSection.model_validate({**algorithm, "whiten_advantages": False, "minibatches": 2}),
        pad_token=0,
        reward=Reward(kind="both", architecture="r", model_scale=0.5, model_offset=1.0),
        critic=Critic(learning_rate=0.25, value_clip=None),
        judged_text=lambda prompt, tokens, response: (*response,),
    )


def test_ppo_asks_every_model_once_and_trains_actor_and_critic_on_what_they_said() -> None:
    models, seconds = Models(), dict[str, float]()
    learner = learner_of(models)

    async def iteration() -> tuple[Any, dict[str, float], dict[str, float]]:
        valued, batch, seen, scored = await made(learner, groups(), Versions(critic=3), 1, seconds)
        assert seen.pop("critic_version") == 3
        return scored, {**seen, **await learner.train_actor(batch, 1)}, await learner.train_critic(valued, 1)

    scored, of_actor, of_critic = asyncio.run(iteration())
    # The rule's reward + 0.5 (2 tokens - 1).
    assert [group.rewards for group in scored] == [(1.5, 0.5)] * 2
    assert [group.model_scores for group in scored] == [(2.0, 2.0)] * 2
    asked = [(to, message) for to, message, _ in models.asked]
    assert {to: message.what for to, message in asked if isinstance(message, wire.Score)} == {
        REFERENCE: "logprobs",
        REWARD: "rewards",
        VALUES: "values",
        TRAINER: "logprobs",
    }
    trained = [(to, message.settings, sent) for to, message, sent in models.asked if isinstance(message, wire.Train)]
    assert [to for to, _, _ in trained] == [TRAINER, TRAINER, CRITIC, CRITIC]
    # log p(policy) - log p(reference) is 0.25: each token loses an eighth, the last one earns the reward.
    first = trained[0][2]
    assert first["advantages"].tolist() == [[0.0, 1.5 - 0.25 - 0.5, 1.5 - 0.125 - 0.5], [0.0, -0.25, -0.125]]
    settings, sent = trained[2][1:]
    assert sent["returns"][0].tolist() == [0.0, 1.25, 1.375] and sent["old_values"][0].tolist()[1:] == [0.5, 0.5]
    assert (settings.loss, settings.learning_rate, settings.value_clip) == ("value", 0.25, None)
    assert "advantages" not in sent and "returns" not in first
    assert of_actor["kl_penalty"] == pytest.approx(0.25)
    assert set(of_critic) == {"value_loss"}
    assert {REFERENCE_INFERENCE, REWARD_INFERENCE, CRITIC_INFERENCE} <= set(seconds)


def rates_of(models: Models) -> dict[str, list[float]]:
    """Return the learning rates that the trainers of both models were told, in order."""
    rates = {TRAINER: list[float](), CRITIC: list[float]()}
    for to, message, _ in models.asked:
        if isinstance(message, wire.Train):
            rates[to].append(message.settings.learning_rate)
    return rates


def test_learning_rates_rise_from_the_first_step_of_each_model() -> None:
    models = Models()
    learner = replace(
        learner_of(models),
        algorithm=AlgorithmSection(kind="ppo", learning_rate=0.5, learning_rate_warmup=4),
        critic=Critic(learning_rate=0.25, learning_rate_warmup=2, warmup_steps=2),
    )

    async def steps() -> None:
        valued, batch, *_ = await made(learner, groups(), Versions(critic=3), 1, {})
        for step in (1, 3, 5, 6, 9):
            await learner.train_critic(valued, step)
            if step > 2:
                await learner.train_actor(batch, step)

    asyncio.run(steps())
    rates = rates_of(models)
    assert rates == {TRAINER: [0.125, 0.375, 0.5, 0.5], CRITIC: [0.125, 0.25, 0.25, 0.25, 0.25]}


def test_learning_rates_fall_until_the_last_step_of_the_run() -> None:
    models = Models()
    learner = replace(
        learner_of(models),
        algorithm=AlgorithmSection(kind="ppo", learning_rate=0.5, learning_rate_warmup=1, learning_rate_decay="linear"),
        critic=Critic(learning_rate=0.25, learning_rate_decay="cosine", warmup_steps=2),
        steps=7,
    )

    async def steps() -> None:
        valued, batch, *_ = await made(learner, groups(), Versions(critic=3), 1, {})
        for step in (3, 5, 7):
            await learner.train_critic(valued, step)
            await learner.train_actor(batch, step)

    asyncio.run(steps())
    rates = rates_of(models)
    assert rates[TRAINER] == pytest.approx([0.5, 0.5 * 3 / 5, 0.5 * 1 / 5])  # its first, third and fifth of five steps
    assert rates[CRITIC] == pytest.approx([0.125 * (1 + math.cos(math.pi * step / 8)) for step in (3, 5, 7)])


def test_values_of_another_version_of_the_critic_end_the_run() -> None:
    learner = learner_of(Models(version=2))
    with pytest.raises(HetrlError, match=f"{VALUES}: scored under weight version 2, not 3"):
        asyncio.run(learner.scored(learner.experience(groups()), groups(), 1, Versions(critic=3), {}))


def test_a_ratio_to_the_sampler_needs_no_pass_and_the_first_step_alone_tells_the_mismatch() -> None:
    trainer, measured, _ = learn({**STALE, "objective": "coupled", "minibatches": 2, "epochs": 2})
    assert [type(message) for _, message, _ in trainer.asked] == [wire.Train] * 4
    told = [{"sampler_logprobs", "fresh"} & set(arrays) for _, _, arrays in trainer.asked]
    assert told == [{"sampler_logprobs", "fresh"}, set(), set(), set()]
    assert trainer.asked[3][2]["old_logprobs"][0].tolist() == pytest.approx([0.0, -0.5, -0.25])
    assert measured["mismatch"] == pytest.approx(0.2)


def test_the_controller_goes_on_while_samples_are_encoded_for_the_reward_model() -> None:
    async def scored() -> Any:
        loop = asyncio.get_running_loop()

        def encode(prompt: Prompt, tokens: Sequence[int], response: Sequence[int]) -> tuple[int, ...]:
            went_on = threading.Event()
            loop.call_soon_threadsafe(went_on.set)
            assert went_on.wait(10), "the event loop stands still"
            return (*response,)

        learner = replace(learner_of(Models()), judged_text=encode)
        return await learner.scored(learner.experience(groups()), groups(), 1, Versions(critic=3), {})

    assert [group.model_scores for group in asyncio.run(scored())[0]] == [(2.0, 2.0)] * 2
