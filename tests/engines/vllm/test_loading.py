"""A weight file read by parts gives the bytes that are in it, whatever the sizes; one that is cut off says so."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

from hetrl.errors import HetrlError
from hetrl.runtime import wire
from hetrl.runtime.vllm.loading import staged, tensors_of
from hetrl.runtime.weights.safetensors_file import HEADER_BYTES, header_of, places_of

CPU = torch.device("cpu")


def write_file(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    places, start = dict[str, tuple[wire.TensorSpec, int]](), 0
    for name, tensor in tensors.items():
        places[name] = wire.TensorSpec(name, "bfloat16", tuple(tensor.shape), tensor.nbytes), start
        start += tensor.nbytes
    parts = [tensor.view(torch.uint8).numpy().tobytes() for tensor in tensors.values()]
    path.write_bytes(header_of(places).ljust(HEADER_BYTES) + b"".join(parts))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=30)
@given(sizes=st.lists(st.integers(1, 40), min_size=1, max_size=8), part=st.integers(1, 24), slots=st.integers(1, 5))
def test_parts_make_up_the_tensors(tmp_path: Path, sizes: list[int], part: int, slots: int) -> None:
    tensors = {f"t{number}": torch.randn(size).bfloat16() for number, size in enumerate(sizes)}
    write_file(tmp_path / "weights", tensors)
    found = dict(staged(tmp_path / "weights", places_of(tmp_path / "weights"), CPU, 2 * part, slots))
    assert {name: one.view(torch.bfloat16).tolist() for name, one in found.items()} == {
        name: one.tolist() for name, one in tensors.items()
    }


def test_mapped_and_staged_say_the_same(tmp_path: Path) -> None:
    tensors = {"b": torch.randn(3, 5).bfloat16(), "a": torch.randn(7).bfloat16()}
    write_file(tmp_path / "weights", tensors)
    places = places_of(tmp_path / "weights")
    mapped = dict(tensors_of(tmp_path / "weights", places, CPU))
    assert mapped.keys() == tensors.keys()
    for name, stored in staged(tmp_path / "weights", places, CPU):
        assert torch.equal(mapped[name], tensors[name])
        assert torch.equal(stored.view(torch.bfloat16).reshape(tensors[name].shape), tensors[name])


def test_a_file_that_is_cut_off_is_refused(tmp_path: Path) -> None:
    write_file(tmp_path / "weights", {"a": torch.ones(64).bfloat16(), "b": torch.ones(64).bfloat16()})
    places = places_of(tmp_path / "weights")
    with (tmp_path / "weights").open("r+b") as file:
        file.truncate(HEADER_BYTES + 200)
    with pytest.raises(HetrlError, match="ends in the middle of b"):
        list(staged(tmp_path / "weights", places, CPU, 32, 2))
