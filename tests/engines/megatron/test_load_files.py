"""A model is loaded from files of which every rank reads its part."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from hetrl.errors import HetrlError
from hetrl.runtime.megatron.layout import Layout
from tests.engines.megatron.megatron_worlds import (
    LAYOUTS,
    Job,
    Worlds,
    assert_same,
    model_config,
    start_engine,
    step_job,
    weights,
)


def write_model(directory: Path, tensors: dict[str, torch.Tensor]) -> int:
    """Write tensors to two files with an index; return their bytes."""
    directory.mkdir(parents=True)
    names = sorted(tensors)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, held in parts.items():
        save_file({name: tensors[name] for name in held}, directory / file)
    index = {"weight_map": {name: file for file, held in parts.items() for name in held}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return sum(tensor.nbytes for tensor in tensors.values())


class CountedFile:
    """A safetensors file that counts the bytes of what is taken out of it."""

    count = 0

    def __init__(self, opened: Any) -> None:
        self._opened = opened

    def __enter__(self) -> CountedFile:
        self._file = self._opened.__enter__()
        return self

    def __exit__(self, *cause: object) -> None:
        self._opened.__exit__(*cause)

    def keys(self) -> list[str]:
        return list(self._file.keys())

    def get_slice(self, name: str) -> CountedSlice:
        return CountedSlice(self._file.get_slice(name))


class CountedSlice:
    def __init__(self, plain: Any) -> None:
        self._plain = plain

    def get_shape(self) -> list[int]:
        return list(self._plain.get_shape())

    def __getitem__(self, place: tuple[slice, ...]) -> torch.Tensor:
        tensor: torch.Tensor = self._plain[place]
        CountedFile.count += tensor.nbytes
        return tensor


def loaded(rank: int, port: int, argument: tuple[Job, Path]) -> tuple[dict[str, torch.Tensor], int]:
    """Load a directory; return what is exported and how many bytes of tensors this rank read."""
    job, directory = argument
    with pytest.MonkeyPatch.context() as patch:
        from hetrl.runtime.megatron import tensor_files

        plain = tensor_files.safe_open
        patch.setattr(tensor_files, "safe_open", lambda *args, **kwargs: CountedFile(plain(*args, **kwargs)))
        CountedFile.count = 0
        engine = start_engine(rank, port, job)
        engine.load_files(directory)
    return dict(engine.export()), CountedFile.count


@pytest.mark.parametrize("tied", [False, True])
def test_a_rank_reads_its_part_of_the_files(worlds: Worlds, tmp_path: Path, tied: bool) -> None:
    config = model_config(tie_word_embeddings=tied)
    tensors = dict(weights(config))
    stored = {**tensors, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    total = write_model(tmp_path / "model", stored | ({"lm_head.weight": torch.ones(128, 64)} if tied else {}))
    job = step_job(config, Layout(2, ((0, 2), (2, 4)), (8,), 2))
    answers = worlds.run(loaded, 4, (job, tmp_path / "model"))
    assert_same(answers[0][0], tensors, 0.0)
    shares = [count / total for _, count in answers]
    assert all(0.2 < share < 0.28 for share in shares), shares


def answers_to_wrong_files(rank: int, port: int, argument: tuple[Job, Path]) -> dict[str, str]:
    """Load each directory; one of them is another one at rank 1."""
    job, root = argument
    engine, messages = start_engine(rank, port, job), {}
    for name in ("missing", "surplus", "shape", "absent", "whole"):
        directory = root / ("nowhere" if name == "absent" and rank == 1 else name if name != "absent" else "whole")
        try:
            engine.load_files(directory)
            messages[name] = "no error"
        except HetrlError as error:
            messages[name] = str(error)
    return messages


def test_what_is_wrong_with_the_files_is_said_on_every_rank(worlds: Worlds, tmp_path: Path) -> None:
    config, name = model_config(), "model.layers.3.mlp.up_proj.weight"
    tensors = dict(weights(config))
    write_model(tmp_path / "whole", tensors)
    write_model(tmp_path / "missing", {key: tensor for key, tensor in tensors.items() if key != name})
    write_model(tmp_path / "surplus", {**tensors, "model.layers.4.mlp.up_proj.weight": tensors[name].clone()})
    write_model(tmp_path / "shape", {**tensors, name: tensors[name][:1].clone()})
    for messages in worlds.run(answers_to_wrong_files, 2, (step_job(config, LAYOUTS["pipeline"]), tmp_path)):
        assert f"1 tensors are missing: {name}" in messages["missing"]
        assert "1 tensors are unknown to this model: model.layers.4.mlp.up_proj.weight" in messages["surplus"]
        assert f"{name} has shape (1, 64), config.json says (96, 64)" in messages["shape"]  # only stage 1 has it
        assert "nowhere: neither model.safetensors nor model.safetensors.index.json is there" in messages["absent"]
        assert messages["whole"] == "no error"
