"""What an agent does with draws, its server in place."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from hetrl.errors import HetrlError
from hetrl.runtime import wire
from hetrl.runtime.run.rollout import Agent, ServerEndedError
from hetrl.runtime.transport.member import Envelope, Member
from hetrl.runtime.vllm.idle import Idle
from hetrl.runtime.vllm.server import VllmServer
from hetrl.runtime.weights.intake import Intake

SAMPLE = wire.Sample(tokens=(7,), logprobs=(-0.5,), versions=(wire.VersionSpan(1, 0, 1),), finish_reason="stop")


class Server:
    """Answers a prompt of one token at once, refuses an empty one, and is never done with a longer one."""

    def __init__(self, ended: bool = False) -> None:
        self.given_up: list[tuple[int, ...]] = []
        self.ended = ended

    async def generate(self, prompt: tuple[int, ...], *_: Any) -> tuple[wire.Sample, ...]:
        if not prompt:
            raise HetrlError("vllm: an empty prompt")
        if len(prompt) > 1:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.given_up.append(prompt)
                raise
        return (SAMPLE,)


class Run:
    """The member of an agent: what arrives, each after the one before was begun, and what it answers to which draw."""

    def __init__(self, *messages: wire.Message) -> None:
        self._messages = [SimpleNamespace(message=message, buffers=()) for message in (*messages, wire.Finish())]
        self.answers: list[tuple[int, wire.Message]] = []

    async def receive(self) -> Envelope:
        for _ in range(5):
            await asyncio.sleep(0)
        return cast(Envelope, self._messages.pop(0))

    async def reply(self, to: Any, message: wire.Message) -> None:
        self.answers.append((to.message.draw, message))


def draw(number: int, *prompt: int) -> wire.Generate:
    sampling = wire.Sampling(samples=1, max_tokens=4, temperature=1.0, top_p=1.0, seed=0)
    return wire.Generate(draw=number, prompt=prompt, sampling=sampling)


def agent(run: Run, server: Server, goes_with_it: bool = True) -> Agent:
    idle, weights = Idle(cast(VllmServer, server), "cuda"), cast(Intake, None)
    parts = cast(Member, run), cast(VllmServer, server), idle, weights
    return Agent(*parts, recompute=True, goes_with_it=goes_with_it)


def served(*messages: wire.Message) -> tuple[Run, Server]:
    run, server = Run(*messages), Server()
    asyncio.run(agent(run, server).serve())
    return run, server


def test_a_draw_that_nobody_wants_is_given_up_and_not_answered() -> None:
    run, server = served(draw(0, 5), draw(1, 5, 6), draw(2, 5, 7), wire.Withdraw(draw=1), draw(3, 8))
    assert [number for number, _ in run.answers] == [0, 3]
    assert server.given_up == [(5, 6), (5, 7)], "the first at once, the other one at the end of the run"


def test_a_withdrawal_that_comes_late_changes_nothing() -> None:
    run, _ = served(draw(0, 5), wire.Withdraw(draw=0), wire.Withdraw(draw=9), draw(1, 5))
    assert [number for number, _ in run.answers] == [0, 1]


def test_a_draw_that_the_server_refuses_is_answered_and_the_others_go_on() -> None:
    run, _ = served(draw(0), draw(1, 5))
    assert isinstance(run.answers[0][1], wire.Failed)
    assert isinstance(run.answers[1][1], wire.Generated)


def test_an_agent_goes_with_its_server_once_it_has_said_so() -> None:
    run, server = Run(draw(0, 5, 6), draw(1), draw(2, 5)), Server(ended=True)
    with pytest.raises(ExceptionGroup) as raised:
        asyncio.run(agent(run, server).serve())
    (error,) = raised.value.exceptions
    assert isinstance(error, ServerEndedError)
    assert error.exit_code == 137, "as of a process that was killed, which is started again"
    assert [(number, type(answer)) for number, answer in run.answers] == [(1, wire.Failed)]
    assert server.given_up == [(5, 6)]


def test_an_agent_whose_job_has_others_stays_without_its_server() -> None:
    run, server = Run(draw(0), draw(1, 5)), Server(ended=True)
    asyncio.run(agent(run, server, goes_with_it=False).serve())
    assert [type(answer) for _, answer in run.answers] == [wire.Failed, wire.Generated]


def test_a_version_behind_which_a_newer_one_follows_is_kept_and_not_loaded() -> None:
    loaded: list[int] = []

    class Loads(Server):
        async def update_weights(self, version: int, *_: Any, **__: Any) -> None:
            loaded.append(version)

    class Proves:
        node, follows = "", False

        async def end(self, end: wire.WeightsEnd) -> tuple[Path, str]:
            return Path(f"version-{end.version}"), f"digest {end.version}"

    class Answers(Run):
        async def reply(self, to: Any, message: wire.Message) -> None:
            self.answers.append((to.message.version, message))

    ends = [wire.WeightsEnd(version=n, tensors=1, bytes=4, digest="d", load=n == 4) for n in (2, 3, 4)]
    run, server = Answers(*ends), Loads()
    parts = cast(Member, run), server, Idle(cast(VllmServer, server), "cuda"), cast(Intake, Proves())
    asyncio.run(Agent(*parts, recompute=True, goes_with_it=True).serve())
    assert loaded == [4]
    digests = [(number, cast(wire.WeightsApplied, answer).digest) for number, answer in run.answers]
    assert digests == [(n, f"digest {n}") for n in (2, 3, 4)]
