"""Architectures against their published counts, Hugging Face configurations, and the dataflow graph."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hetrl.errors import UsageError
from hetrl.workload import (
    ACTOR_GENERATION,
    ACTOR_TRAINING,
    CRITIC_INFERENCE,
    CRITIC_TRAINING,
    REFERENCE_INFERENCE,
    REWARD_INFERENCE,
    TASKS,
    Architecture,
    Lengths,
    Workload,
    architecture,
    architecture_catalogue,
    architecture_from_hf_config,
)

# The number of elements of the published safetensors files. Qwen3 0.6B and 1.7B store the tied output layer a second
# time (751,632,384 and 2,031,739,904 elements): vocabulary x hidden is taken off here. LLaMA 1 and MPT-7B: the number
# of parameters that transformers prints. MPT 1B, 3B, 13B: `NumParams` at 2048 tokens in llm-foundry's
# scripts/train/benchmarking/README.md.
PUBLISHED = {
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 751_632_384 - 151_936 * 1024,
    "qwen3-1.7b": 2_031_739_904 - 151_936 * 2048,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "llama-1-7b": 6_738_415_616,
    "llama-1-13b": 13_015_864_320,
    "llama-1-30b": 32_528_943_616,
    "llama-1-65b": 65_285_660_672,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "llama-3.3-70b": 70_553_706_496,
    "mpt-1b": 1_315_950_592,
    "mpt-3b": 2_651_837_440,
    "mpt-7b": 6_649_286_656,
    "mpt-13b": 12_853_954_560,
}
ROUNDED_ONLY = {"mpt-30b": 30}  # in 1e9

# "Number of Parameters (Non-Embedding)" of the model cards, in 1e9.
NON_EMBEDDING = {
    "qwen2.5-0.5b": "0.36",
    "qwen2.5-1.5b": "1.31",
    "qwen2.5-3b": "2.77",
    "qwen2.5-7b": "6.53",
    "qwen3-0.6b": "0.44",
    "qwen3-1.7b": "1.4",
    "qwen3-4b": "3.6",
    "qwen3-8b": "6.95",
    "qwen3-14b": "13.2",
    "qwen3-32b": "31.2",
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_the_published_ones(name: str) -> None:
    assert architecture(name).parameters == PUBLISHED[name]


@pytest.mark.parametrize("name", ROUNDED_ONLY)
def test_parameters_round_to_the_published_size(name: str) -> None:
    assert round(architecture(name).parameters / 1e9) == ROUNDED_ONLY[name]


def test_every_entry_is_compared_with_a_published_count() -> None:
    generated = {"tiny-qwen3"}  # compared with its own config.json in test_model_directory.py
    assert set(architecture_catalogue()) - generated == set(PUBLISHED) | set(ROUNDED_ONLY)


@pytest.mark.parametrize("name", NON_EMBEDDING)
def test_parameters_without_embeddings_are_those_of_the_model_card(name: str) -> None:
    model = architecture(name)
    copies = 1 if model.tied_embeddings else 2
    published = NON_EMBEDDING[name]
    digits = len(published.split(".")[1])
    assert f"{(model.parameters - copies * model.embedding_parameters) / 1e9:.{digits}f}" == published


@pytest.mark.parametrize(
    ("name", "kibibytes"), [("qwen2.5-7b", 56), ("qwen3-8b", 144), ("llama-2-7b", 512), ("llama-3.1-8b", 128)]
)
def test_kv_cache_of_one_token(name: str, kibibytes: int) -> None:
    model = architecture(name)
    assert model.layers * model.kv_bytes_per_token_layer == kibibytes * 1024


def test_catalogue_entries_are_whole() -> None:
    for model in architecture_catalogue().values():
        assert model.heads % model.kv_heads == 0, model.name
        assert model.head_parameters == model.vocabulary * model.hidden
        assert model.layer_matrix_parameters < model.layer_parameters < model.parameters
        assert model.source, model.name


def test_linear_bias_adds_one_value_per_output_of_every_matrix() -> None:
    plain = Architecture("plain", 1, hidden=8, heads=4, kv_heads=2, head_dim=2, intermediate=16, vocabulary=32)
    qkv = (4 + 2 + 2) * 2
    assert replace(plain, qkv_bias=True).layer_parameters - plain.layer_parameters == qkv
    assert replace(plain, linear_bias=True).layer_parameters - plain.layer_parameters == qkv + 8 + (16 + 16 + 8)
    two_matrices = replace(plain, gated_mlp=False)
    with_bias = replace(two_matrices, linear_bias=True, qkv_bias=True)
    assert with_bias.layer_parameters - two_matrices.layer_parameters == qkv + 8 + (16 + 8)


def test_learned_positions_count() -> None:
    plain = Architecture("plain", 1, hidden=8, heads=4, kv_heads=2, head_dim=2, intermediate=16, vocabulary=32)
    assert replace(plain, positions=100).parameters - plain.parameters == 100 * 8


QWEN2 = {
    "model_type": "qwen2",
    "hidden_size": 896,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "intermediate_size": 4864,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
QWEN3 = {
    "model_type": "qwen3",
    "hidden_size": 2560,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 9728,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
    "attention_bias": False,
}
LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
}
LLAMA_1 = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "intermediate_size": 11008,
    "vocab_size": 32000,
}


@pytest.mark.parametrize(
    ("config", "name"),
    [(QWEN2, "qwen2.5-0.5b"), (QWEN3, "qwen3-4b"), (LLAMA, "llama-3.1-8b"), (LLAMA_1, "llama-1-7b")],
)
def test_a_hugging_face_configuration_gives_the_catalogue_entry(config: dict[str, Any], name: str) -> None:
    entry = architecture(name)
    assert replace(architecture_from_hf_config(config, name), source=entry.source) == entry


def test_a_directory_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3))
    model = architecture(str(tmp_path))
    assert model.parameters == PUBLISHED["qwen3-4b"]
    assert model.name == str(tmp_path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "gpt2"}, ["my-model", '"gpt2"', "qwen3", "llama"]),
        ({"hidden_size": "wide"}, ["my-model", "wide"]),
        ({"num_hidden_layers": None}, ["my-model", "whole number"]),
        ({"attention_bias": True}, ["my-model", "attention_bias", "llama"]),
        ({"mlp_bias": True}, ["my-model", "mlp_bias", "llama"]),
    ],
)
def test_a_configuration_that_cannot_be_counted_is_refused(change: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(UsageError) as refusal:
        architecture_from_hf_config(LLAMA | change, "my-model")
    assert all(word in str(refusal.value) for word in words)


@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"])
def test_a_missing_key_is_named(key: str) -> None:
    with pytest.raises(UsageError, match=f"my-model: config.json has no '{key}'"):
        architecture_from_hf_config({k: v for k, v in LLAMA.items() if k != key}, "my-model")


@pytest.mark.parametrize(("text", "words"), [("{", "not JSON"), ("[1]", "expected keys and values")])
def test_a_file_that_is_no_configuration_is_named(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UsageError, match=f"config.json: {words}"):
        architecture(str(tmp_path))


def test_an_unknown_name_meets_its_neighbour() -> None:
    with pytest.raises(UsageError, match='unknown architecture "qwen3-8".*did you mean "qwen3-8b"') as refusal:
        architecture("qwen3-8")
    assert "directory" in str(refusal.value)
    assert refusal.value.exit_code == 2


ACTOR = architecture("qwen3-8b")
SMALL = architecture("qwen3-0.6b")


def job(**changes: Any) -> Workload:
    shared: dict[str, Any] = {
        "algorithm": "grpo",
        "mode": "sync",
        "max_staleness": 0,
        "samples": 1024,
        "samples_per_prompt": 8,
        "prompt_tokens": 1024,
        "response": Lengths(mean=600.0, maximum=1024, kind="lognormal"),
        "optimizer_steps_per_iteration": 4,
        "actor": ACTOR,
    }
    return Workload(**(shared | changes))


def test_ppo_has_all_six_tasks() -> None:
    ppo = job(algorithm="ppo", critic=SMALL, reference=ACTOR, reward=SMALL)
    inferences = [REFERENCE_INFERENCE, REWARD_INFERENCE, CRITIC_INFERENCE]
    assert ppo.tasks == TASKS
    assert set(ppo.edges) == {
        *((ACTOR_GENERATION, inference) for inference in inferences),
        *((inference, ACTOR_TRAINING) for inference in inferences),
        *((inference, CRITIC_TRAINING) for inference in inferences),
        (ACTOR_TRAINING, ACTOR_GENERATION),
    }
    assert len(ppo.edges) == 10
    assert ppo.architecture_of(CRITIC_TRAINING) == ppo.architecture_of(CRITIC_INFERENCE) == SMALL
    assert ppo.architecture_of(ACTOR_GENERATION) == ACTOR


def test_grpo_with_a_reward_model_has_no_critic() -> None:
    grpo = job(reference=ACTOR, reward=SMALL)
    assert grpo.tasks == (ACTOR_GENERATION, REFERENCE_INFERENCE, REWARD_INFERENCE, ACTOR_TRAINING)
    assert set(grpo.edges) == {
        (ACTOR_GENERATION, REFERENCE_INFERENCE),
        (ACTOR_GENERATION, REWARD_INFERENCE),
        (REFERENCE_INFERENCE, ACTOR_TRAINING),
        (REWARD_INFERENCE, ACTOR_TRAINING),
        (ACTOR_TRAINING, ACTOR_GENERATION),
    }


def test_grpo_with_a_rule_has_three_tasks() -> None:
    grpo = job(reference=ACTOR)
    assert grpo.tasks == (ACTOR_GENERATION, REFERENCE_INFERENCE, ACTOR_TRAINING)
    assert set(grpo.edges) == {
        (ACTOR_GENERATION, REFERENCE_INFERENCE),
        (REFERENCE_INFERENCE, ACTOR_TRAINING),
        (ACTOR_TRAINING, ACTOR_GENERATION),
    }


def test_without_inferences_training_follows_generation() -> None:
    grpo = job()
    assert grpo.tasks == (ACTOR_GENERATION, ACTOR_TRAINING)
    assert set(grpo.edges) == {(ACTOR_GENERATION, ACTOR_TRAINING), (ACTOR_TRAINING, ACTOR_GENERATION)}


def test_sequence_lengths() -> None:
    assert job().sequence_tokens == 1624.0
    assert job().max_sequence_tokens == 2048


def test_sizes_need_no_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from hetrl.describe.experiment import Experiment\n"
        "from hetrl.hardware import gpu_type\n"
        "from hetrl.workload import architecture\n"
        "print(architecture('qwen3-8b').parameters, gpu_type('l4').memory_gb)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (ran.stdout, ran.stderr) == ("8190735360 24\n", "")
