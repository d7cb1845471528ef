"""The policy's directory: written for the tiny model, read for a real one, refused with a reason."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from hetrl.describe.experiment import Model
from hetrl.errors import UsageError
from hetrl.runtime.weights.model_directory import TINY, ensure_model_directory
from hetrl.workload import architecture, architecture_from_hf_config


def test_the_tiny_model_has_the_shape_of_the_catalogue_and_the_same_bytes_everywhere(tmp_path: Path) -> None:
    shape = architecture(TINY)
    first, second = (ensure_model_directory(Model(architecture=TINY), shape, tmp_path / site) for site in "ab")
    read = architecture_from_hf_config(first.config, TINY)
    assert dataclasses.replace(read, source=shape.source) == shape
    assert first.weights is None
    assert {p.name: p.read_bytes() for p in first.path.iterdir()} == {
        p.name: p.read_bytes() for p in second.path.iterdir()
    }


def test_a_directory_with_weights_is_taken_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    (tmp_path / "model.safetensors").touch()
    found = ensure_model_directory(
        Model(architecture="qwen3-8b", weights=str(tmp_path)), architecture("qwen3-8b"), tmp_path
    )
    assert found.weights == found.path == tmp_path


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "No such file"),
        ({"config.json": "{"}, "not JSON"),
        ({"config.json": "{}"}, r"no \*\.safetensors"),
    ],
)
def test_an_incomplete_directory_is_refused(tmp_path: Path, files: dict[str, str], message: str) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    model = Model(architecture="qwen3-8b", weights=str(tmp_path))
    with pytest.raises(UsageError, match=message):
        ensure_model_directory(model, architecture("qwen3-8b"), tmp_path / "scratch")


def test_chat_models_stop_at_the_end_of_a_turn_too(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 1}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 1, 8]}))
    (tmp_path / "model.safetensors").touch()
    found = ensure_model_directory(
        Model(architecture="qwen3-8b", weights=str(tmp_path)), architecture("qwen3-8b"), tmp_path
    )
    assert found.stop_tokens == (7, 1, 8)
    assert found.pad_token == 7


def test_a_model_that_never_stops_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").touch()
    found = ensure_model_directory(
        Model(architecture="qwen3-8b", weights=str(tmp_path)), architecture("qwen3-8b"), tmp_path
    )
    with pytest.raises(UsageError, match="no eos_token_id"):
        _ = found.stop_tokens


def test_a_shape_without_weights_cannot_run(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="give the directory"):
        ensure_model_directory(Model(architecture="qwen3-8b"), architecture("qwen3-8b"), tmp_path)
