from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from hetrl.errors import HetrlError, UsageError
from hetrl.runtime.megatron import hf_weights
from hetrl.runtime.megatron.layout import Layout
from tests.engines.megatron.megatron_worlds import model_config

KINDS = ["qwen3", "qwen2", "llama"]


def test_every_tensor_of_transformers_has_a_home_of_its_shape() -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    for kind in KINDS:
        config = model_config(kind)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
        theirs = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        ours = {name: home.shape for name, home in hf_weights.homes(hf_weights.architecture_of(config)).items()}
        assert ours == theirs


def test_a_tied_model_has_no_output_tensor_but_a_twin() -> None:
    homes = hf_weights.homes(hf_weights.architecture_of(model_config(tie_word_embeddings=True)))
    assert "lm_head.weight" not in homes
    assert homes["model.embed_tokens.weight"].twin == "output_layer.weight"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tensor", [1, 2])
def test_shards_written_to_megatron_parameters_read_and_merge_back(kind: str, tensor: int) -> None:
    config = model_config(kind, vocab_size=127)
    architecture = hf_weights.architecture_of(config)
    homes = hf_weights.homes(architecture)
    ranks: list[dict[str, torch.Tensor]] = [{} for _ in range(tensor)]
    weights = dict(hf_weights.random_weights(config, 0))
    for rank, parameters in enumerate(ranks):
        for name, home in homes.items():
            parameter = parameters.setdefault(home.parameter, empty_parameter(home, architecture, tensor))
            part = hf_weights.shard(weights[name], home, rank, tensor)
            hf_weights.write(parameter, part, home, architecture)
        assert not any(parameter.isnan().any() for parameter in parameters.values())
    for name, home in homes.items():
        parts = [hf_weights.read(parameters[home.parameter], home, architecture) for parameters in ranks]
        assert torch.equal(hf_weights.merge(parts, home), weights[name]), name


def empty_parameter(home: hf_weights.Home, architecture: Any, tensor: int) -> torch.Tensor:
    """Return a megatron parameter of one rank, full of NaN; a shape is that of the layer's fused matrix."""
    shape = list(home.shape)
    if "linear_qkv" in home.parameter:
        shape[0] = (architecture.heads + 2 * architecture.kv_heads) * architecture.head_dim
    if "linear_fc1" in home.parameter:
        shape[0] = 2 * architecture.intermediate
    if home.split is not None:
        shape[home.split] = hf_weights.padded(shape[home.split], tensor) // tensor
    return torch.full(shape, float("nan"))


def test_qkv_is_interleaved_by_group_and_gate_stands_before_up() -> None:
    architecture = hf_weights.architecture_of(model_config())  # 4 heads, 2 key-value heads, head_dim 16
    homes = hf_weights.homes(architecture)
    qkv = torch.arange(8 * 16).float().unsqueeze(1)
    rows = {
        part: hf_weights.read(qkv, homes[f"model.layers.0.self_attn.{part}_proj.weight"], architecture)
        for part in "qkv"
    }
    blocks = {part: (tensor[::16, 0] / 16).tolist() for part, tensor in rows.items()}
    assert blocks == {"q": [0, 1, 4, 5], "k": [2, 6], "v": [3, 7]}
    fc1 = torch.arange(2 * 96).float().unsqueeze(1)
    gate, up = (
        hf_weights.read(fc1, homes[f"model.layers.0.mlp.{part}_proj.weight"], architecture) for part in ("gate", "up")
    )
    assert (gate[0, 0], up[0, 0]) == (0.0, 96.0)


def test_stage_of_puts_the_embedding_first_and_the_head_last() -> None:
    homes = hf_weights.homes(hf_weights.architecture_of(model_config()))
    layout = Layout(1, ((0, 1), (1, 4)), (2,), 2)
    names = ("model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight")
    assert [hf_weights.stage_of(homes[name], layout) for name in names] == [0, 0, 1]
    assert [hf_weights.stage_of(homes[name], layout) for name in ("model.norm.weight", "lm_head.weight")] == [1, 1]


def test_random_weights_depend_on_seed_and_name_alone() -> None:
    config = model_config(hidden_size=128)
    first, again = (dict(hf_weights.random_weights(config, 3)) for _ in range(2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    fewer = dict(hf_weights.random_weights(config | {"num_hidden_layers": 2}, 3))
    assert all(torch.equal(first[name], fewer[name]) for name in fewer)
    other = dict(hf_weights.random_weights(config, 4))
    name = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(first[name], other[name])
    assert not torch.equal(first[name], first["model.layers.1.mlp.up_proj.weight"])
    assert float(first[name].std()) == pytest.approx(config["initializer_range"], rel=0.05)
    assert (first["model.norm.weight"] == 1).all()
    assert {tensor.dtype for tensor in first.values()} == {torch.float32}


def test_safetensors_are_read_from_one_file_or_through_the_index(tmp_path: Path) -> None:
    tensors = {name: torch.full((2,), float(i)) for i, name in enumerate("abc")}
    single, sharded = tmp_path / "single", tmp_path / "sharded"
    single.mkdir()
    sharded.mkdir()
    save_file(tensors, single / "model.safetensors")
    save_file({"a": tensors["a"]}, sharded / "x.safetensors")
    save_file({"b": tensors["b"], "c": tensors["c"]}, sharded / "y.safetensors")
    index = {"weight_map": {"a": "x.safetensors", "b": "y.safetensors", "c": "y.safetensors"}}
    (sharded / "model.safetensors.index.json").write_text(json.dumps(index))
    for directory in (single, sharded):
        found = dict(hf_weights.iter_safetensors(directory))
        assert list(found) == list(tensors)
        assert all(torch.equal(found[name], tensors[name]) for name in tensors)


def test_files_that_are_missing_or_broken_are_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no config\.json"):
        hf_weights.read_config(tmp_path)
    with pytest.raises(UsageError, match=r"neither model\.safetensors"):
        list(hf_weights.iter_safetensors(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UsageError, match="not valid JSON"):
        hf_weights.read_config(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"short")
    with pytest.raises(UsageError, match="cannot be read"):
        list(hf_weights.iter_safetensors(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    assert hf_weights.read_config(tmp_path) == {"model_type": "qwen3"}


@pytest.mark.parametrize(
    "change", [{"hidden_act": "gelu"}, {"attention_bias": True}, {"mlp_bias": True}, {"use_sliding_window": True}]
)
def test_features_that_are_not_computed_are_refused_by_name(change: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(change))):
        hf_weights.architecture_of(model_config() | change)


def test_missing_and_surplus_tensors_are_named() -> None:
    wanted = {name: hf_weights.Home(name, (1,)) for name in "ab"}
    hf_weights.missing_and_surplus({"a", "b"}, wanted)
    with pytest.raises(HetrlError, match="1 tensors are missing: b"):
        hf_weights.missing_and_surplus({"a"}, wanted)
    with pytest.raises(HetrlError, match="1 tensors are unknown to this model: c"):
        hf_weights.missing_and_surplus({"a", "b", "c"}, wanted)
