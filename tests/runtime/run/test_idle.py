"""What an agent asks of its server when a GPU goes from hand to hand, with a server in place that notes it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from hetrl.runtime import wire
from hetrl.runtime.run.rollout import Agent
from hetrl.runtime.transport.member import Envelope, Member
from hetrl.runtime.vllm.idle import Idle
from hetrl.runtime.vllm.server import VllmServer
from hetrl.runtime.weights.intake import Intake


class Server:
    """Notes what it is asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.given_seconds: dict[str, float] = {}

    async def call(self, route: str, *_: Any, timeout_seconds: float = 60.0) -> None:
        self.asked.append(route)
        self.given_seconds[route] = timeout_seconds

    async def pause(self, *, forget: bool) -> None:
        self.asked.append(f"pause, forget {forget}")

    async def resume(self) -> None:
        self.asked.append("resume")

    async def load_weights(self, version: int, *_: Any) -> None:
        self.asked.append(f"load {version}")

    async def update_weights(self, version: int, *_: Any, recompute: bool) -> None:
        self.asked.append(f"update {version}")


class Run:
    """The member of an agent: what arrives, and what it answers."""

    def __init__(self, *messages: wire.Message) -> None:
        self._messages = [SimpleNamespace(message=message, buffers=()) for message in (*messages, wire.Finish())]
        self.answers: list[wire.Message] = []

    async def receive(self) -> Envelope:
        return cast(Envelope, self._messages.pop(0))

    async def reply(self, _: Envelope, message: wire.Message) -> None:
        self.answers.append(message)


class Files:
    """Weights that are whole as soon as they end."""

    node, follows = "", False

    async def end(self, end: wire.WeightsEnd) -> tuple[Path, str]:
        return Path(f"version-{end.version}"), end.digest


def asked(*messages: wire.Message, device: str = "cuda", recompute: bool = True) -> list[str]:
    """Return what a server is asked when these arrive; every one of them is answered."""
    server, run = Server(), Run(*messages)
    idle = Idle(cast(VllmServer, server), device)
    parts = cast(Member, run), cast(VllmServer, server), idle, cast(Intake, Files())
    agent = Agent(*parts, recompute=recompute, goes_with_it=False)
    asyncio.run(agent.serve())
    assert len(run.answers) == len(messages)
    return server.asked


def sleep(state: str, *, keep: bool = False) -> wire.Sleep:
    return wire.Sleep(idle_state=state, keep_weights=keep)


def version(number: int) -> wire.WeightsEnd:
    return wire.WeightsEnd(version=number, tensors=1, bytes=1, digest="d")


def test_a_copy_of_140_gb_of_weights_may_be_pinned_at_2_gb_a_second() -> None:
    server = Server()
    idle = Idle(cast(VllmServer, server), "cuda")

    async def load() -> None:
        pass

    async def sleep_and_wake() -> None:
        await idle.sleep("offload", keep_weights=True)
        await idle.wake(load)

    asyncio.run(sleep_and_wake())
    assert len(server.given_seconds) == 3 and min(server.given_seconds.values()) >= 140 / 2


@pytest.mark.parametrize(
    ("state", "asleep", "awake"),
    [
        ("resident", ["pause, forget False", "/collective_rpc"], ["resume"]),
        ("sleep", ["pause, forget True", "/release_kv_cache_memory"], ["/wake_up?tags=kv_cache"]),
        ("offload", ["/sleep?level=1&mode=keep"], ["/wake_up?tags=weights", "/wake_up?tags=kv_cache"]),
    ],
)
def test_a_server_frees_what_its_state_says_and_takes_it_back(state: str, asleep: list[str], awake: list[str]) -> None:
    assert asked(sleep(state, keep=True), wire.Wake()) == [*asleep, *awake]


@pytest.mark.parametrize("state", ["resident", "sleep", "offload"])
def test_a_version_that_arrives_meanwhile_is_loaded_when_there_is_room(state: str) -> None:
    *_, loaded, last = asked(version(1), sleep(state), version(2), wire.Wake())
    assert loaded == "load 2"
    assert last in ("resume", "/wake_up?tags=kv_cache")


@pytest.mark.parametrize(
    ("recompute", "asleep"),
    [
        (True, ["pause, forget False", "/collective_rpc", "pause, forget True", "load 2", "resume"]),
        (False, ["pause, forget False", "/collective_rpc", "load 2", "resume"]),
    ],
)
def test_what_a_resident_server_kept_of_the_version_before_is_computed_anew(recompute: bool, asleep: list[str]) -> None:
    messages = (sleep("resident", keep=True), version(2), wire.Wake())
    assert asked(*messages, recompute=recompute) == asleep
    again = asked(*messages, sleep("resident", keep=True), wire.Wake(), recompute=recompute)
    assert again == [*asleep, "pause, forget False", "/collective_rpc", "resume"]


def test_weights_come_back_between_the_two_halves_of_a_sleep() -> None:
    assert asked(sleep("offload"), version(2), wire.Wake())[1:] == [
        "/wake_up?tags=weights",
        "load 2",
        "/wake_up?tags=kv_cache",
    ]


def test_weights_that_were_given_up_for_nothing_are_read_again() -> None:
    assert "load 1" in asked(version(1), sleep("offload", keep=False), wire.Wake())


@pytest.mark.parametrize("state", ["resident", "sleep"])
def test_weights_that_stayed_are_not_read_again(state: str) -> None:
    assert "load 1" not in asked(version(1), sleep(state, keep=False), wire.Wake())


def test_who_is_awake_is_updated_at_once() -> None:
    assert asked(version(1), sleep("sleep"), wire.Wake(), version(2))[-1] == "update 2"


def test_a_server_on_a_cpu_stops_and_goes_on() -> None:
    assert asked(sleep("sleep"), wire.Wake(), device="cpu") == ["pause, forget True", "resume"]
