"""Versions that a server is to load: one that cannot be loaded to its end is never served under the old number."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from hetrl.errors import HetrlError
from tests.runtime.vllm.vllm_cases import Served, weight_file


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    """What stands for the server's process."""
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()


async def _fail(body: Mapping[str, Any] | None) -> None:
    raise HetrlError("vllm: answered 500: [Errno 5] Input/output error")


def load(server: Served, version: int, path: Path) -> None:
    asyncio.run(server.update_weights(version, path, 60.0))


@pytest.mark.parametrize("route", ["/update_weights", "/finish_weight_update"])
def test_a_server_whose_model_may_be_of_two_versions_is_ended(
    tmp_path: Path, process: subprocess.Popen[bytes], route: str
) -> None:
    server = Served(tmp_path)
    server._process, server.answer = process, _fail
    load(server, 1, weight_file(tmp_path, 1))
    server.answered = route
    with pytest.raises(HetrlError, match="weight version 2: .*Input/output error"):
        load(server, 2, weight_file(tmp_path, 2))
    assert server.ended
    assert server.asked[-1] == route, "it never goes on"


def test_a_file_with_other_tensors_is_refused_before_the_model_is_touched(
    tmp_path: Path, process: subprocess.Popen[bytes]
) -> None:
    server = Served(tmp_path)
    server._process = process
    load(server, 1, weight_file(tmp_path, 1))
    del server.asked[:]
    with pytest.raises(HetrlError, match=r"weight version 2: .*a\.weight is not as in the version before"):
        load(server, 2, weight_file(tmp_path, 2, shape=(4,)))
    assert not server.ended
    assert server.asked == ["/pause?mode=keep&clear_cache=true", "/resume"]


def test_a_server_that_has_no_weights_yet_waits_for_the_next_version(
    tmp_path: Path, process: subprocess.Popen[bytes]
) -> None:
    server = Served(tmp_path, load_format="dummy")
    server._process, server.answer, server.answered = process, _fail, "/update_weights"
    with pytest.raises(HetrlError, match="weight version 1: "):
        load(server, 1, weight_file(tmp_path, 1))
    assert not server.ended
    server.answered = ""
    load(server, 2, weight_file(tmp_path, 2))
