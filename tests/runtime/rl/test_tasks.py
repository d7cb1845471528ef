"""What the controller asks of the Megatron tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, strategies as st

from hetrl.errors import HetrlError
from hetrl.runtime import wire
from hetrl.runtime.rl.tasks import Inference
from hetrl.runtime.transport.member import Envelope, Member
from hetrl.runtime.wire.arrays import pack, unpack

WORLDS = {"a/critic_inference/0": 2, "b/critic_inference/1": 1, "b/critic_inference/2": 1}
ARRAYS = {"tokens": np.arange(32).reshape(8, 4), "lengths": np.full(8, 4)}


class Worlds:
    """Each answers under the next of its versions, with that version as every score."""

    def __init__(self, versions: Sequence[Sequence[int]]) -> None:
        self.versions = dict(zip(WORLDS, map(list, versions), strict=True))
        self.asked = dict.fromkeys(WORLDS, 0)

    async def request(self, to: str, message: wire.Score, buffers: Sequence[memoryview], **_: Any) -> Envelope:
        await asyncio.sleep(0)
        self.asked[to] += 1
        coming = self.versions[to]
        version = coming.pop(0) if len(coming) > 1 else coming[0]
        shape = unpack(message.arrays, list(buffers))["tokens"].shape
        specs, scores = pack({"scores": np.full(shape, version, np.float32)})
        scored = wire.Scored(step=message.step, arrays=specs, seconds=0.0, version=version)
        return Envelope(cast(Any, None), scored, tuple(scores))


def inference(worlds: Worlds) -> Inference:
    return Inference(cast(Member, worlds), "critic_inference", WORLDS, "values")


@given(st.lists(st.lists(st.integers(0, 3), max_size=3).map(sorted).map(lambda one: [*one, 4]), min_size=3, max_size=3))
def test_all_scores_are_of_one_version_whenever_it_arrives(versions: list[list[int]]) -> None:
    worlds = Worlds(versions)
    scores, version = asyncio.run(inference(worlds).newest_scores(ARRAYS, 5, 0))
    assert (scores == version).all()
    assert version in range(5)


def test_who_had_the_version_is_not_asked_again() -> None:
    worlds = Worlds([[1, 2], [2], [2]])
    scores, version = asyncio.run(inference(worlds).newest_scores(ARRAYS, 5, 0))
    assert version == 2
    assert (scores == 2).all()
    assert [*worlds.asked.values()] == [2, 1, 1]


def test_scores_under_another_version_than_was_asked_for_are_an_error() -> None:
    with pytest.raises(HetrlError, match="b/critic_inference/1: scored under weight version 3, not 2"):
        asyncio.run(inference(Worlds([[2], [3], [2]])).scores(ARRAYS, 1, 2))


@pytest.mark.parametrize(("version", "wanted"), [(1, "2 to 4"), (5, "2 to 4"), (99, "2 to 4")])
def test_who_claims_a_version_that_cannot_be_is_named(version: int, wanted: str) -> None:
    """One that is lost, or lies, would otherwise have the others asked again and again."""
    match = f"b/critic_inference/2: scored under weight version {version}, not {wanted}"
    with pytest.raises(HetrlError, match=match):
        asyncio.run(inference(Worlds([[2], [2], [version]])).newest_scores(ARRAYS, 5, 2))
