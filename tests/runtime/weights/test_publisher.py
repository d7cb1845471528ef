"""What a publisher makes of receivers that fail."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from hetrl.errors import HetrlError
from hetrl.runtime import wire
from hetrl.runtime.rl.tasks import Trainer
from hetrl.runtime.transport.member import Envelope, Member, RunAborted
from hetrl.runtime.weights.publisher import Publisher


class Receivers:
    """Answer as they are told to: with a message, an error, or, None, as one that applied the version."""

    def __init__(self, answers: dict[str, wire.Message | HetrlError | None]) -> None:
        self._answers = answers

    async def request(self, to: str, end: wire.WeightsEnd, **_: Any) -> Envelope:
        answer = self._answers[to]
        if isinstance(answer, HetrlError):
            raise answer
        message = wire.WeightsApplied(version=end.version, digest=end.digest, seconds=0.5)
        return Envelope(cast(Any, None), answer or message, ())


def published(answers: dict[str, wire.Message | HetrlError | None]) -> wire.Published:
    async def run() -> wire.Published:
        request = wire.Publish(version=4, receivers=tuple(answers))
        return await Publisher(cast(Member, Receivers(answers)), request, asyncio.get_running_loop()).finish()

    return asyncio.run(run())


def test_receivers_that_fail_are_named_and_the_others_have_the_version() -> None:
    found = published(
        {
            "a": None,
            "b": HetrlError("b failed (apply weight version 4): out of memory"),
            "c": wire.WeightsRejected(version=4, cause="a tensor is missing"),
            "d": wire.WeightsApplied(version=4, digest="other", seconds=0.1),
            "e": wire.Done(),
        }
    )
    assert found.apply_seconds == {"a": 0.5}
    assert set(found.failed) == {"b", "c", "d", "e"}
    assert "out of memory" in found.failed["b"]
    assert found.failed["c"] == "c: refused weight version 4: a tensor is missing"
    assert "d: weight version 4 arrived as other" in found.failed["d"]
    assert found.failed["e"] == "e: answered Done to weight version 4"


def test_a_version_that_nobody_took_is_an_error() -> None:
    with pytest.raises(HetrlError, match=r"refused weight version 4: too small; b failed"):
        published({"a": wire.WeightsRejected(version=4, cause="too small"), "b": HetrlError("b failed")})


def test_the_end_of_the_run_is_no_failure_of_a_receiver() -> None:
    with pytest.raises(RunAborted):
        published({"a": None, "b": RunAborted("the controller ends it")})


@pytest.mark.parametrize("may_fail", [True, False])
def test_weights_that_a_task_cannot_do_without_must_reach_all(may_fail: bool) -> None:
    class Answers:
        async def request(self, *_: Any, **__: Any) -> Envelope:
            answer = wire.Published(
                version=4, digest="d", bytes=1, seconds=0.1, apply_seconds={"a": 0.1}, failed={"b": "b failed"}
            )
            return Envelope(cast(Any, None), answer, ())

    trainer = Trainer(cast(Member, Answers()), "actor_training", "a/actor_training/0", ("a", "b"))
    if may_fail:
        assert asyncio.run(trainer.publish(4, may_fail=True)).failed == {"b": "b failed"}
    else:
        with pytest.raises(HetrlError, match="b failed"):
            asyncio.run(trainer.publish(4))
