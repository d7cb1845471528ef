"""The tiny model: the same files at every site, one token per character."""

from __future__ import annotations

import hashlib

import pytest
from tokenizers import Tokenizer

from hetrl.runtime.weights.tiny_model import CHARACTERS, END, END_ID, UNKNOWN_ID, VOCABULARY, write_tiny_model


def test_the_files_are_the_same_bytes_each_time(tmp_path) -> None:
    for name in ("one", "two"):
        write_tiny_model(tmp_path / name, layers=3)
    one, two = ({file.name: file.read_bytes() for file in (tmp_path / name).iterdir()} for name in ("one", "two"))
    assert one == two
    assert sorted(one) == ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"]


def test_the_tokenizer_never_changes(tmp_path) -> None:
    write_tiny_model(tmp_path)
    digest = hashlib.sha256((tmp_path / "tokenizer.json").read_bytes()).hexdigest()
    assert digest == "a43da57e378810bae3b77a0e390902ffb45c5e9d1ed63ba5a3541e5f7b7460b7"


def test_every_character_is_one_token_and_comes_back(tmp_path) -> None:
    write_tiny_model(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    ids = tokenizer.encode(CHARACTERS).ids
    assert [VOCABULARY[number] for number in ids] == list(CHARACTERS)
    assert tokenizer.decode(ids) == CHARACTERS
    assert tokenizer.encode(f"3 7 >{END}").tokens == ["3", " ", "7", " ", ">", END]
    assert tokenizer.encode(f"é{END}").ids == [UNKNOWN_ID, END_ID]


@pytest.mark.parametrize("shape", [{"head_dim": 16}, {"heads": 4, "kv_heads": 3}])
def test_shapes_that_vllm_cannot_serve_are_refused(tmp_path, shape) -> None:
    with pytest.raises(ValueError, match="multiple of"):
        write_tiny_model(tmp_path, **shape)
