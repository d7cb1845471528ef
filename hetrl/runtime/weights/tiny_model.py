"""A tiny Qwen3 and its character tokenizer: the model that the quickstart and the tests train from random weights.

Every site writes the directory on its own, so the files are the same bytes each time.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hetrl.files import replace_text

PAD, END, UNKNOWN = "<pad>", "<eos>", "<unk>"
SPECIAL_TOKENS = (PAD, END, UNKNOWN)
CHARACTERS = "\n 0123456789abcdefghijklmnopqrstuvwxyz+-*/=<>()[].,:;?!'\"#%|_"
VOCABULARY = (*SPECIAL_TOKENS, *CHARACTERS)
PAD_ID, END_ID, UNKNOWN_ID = 0, 1, 2

_FIXED_CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "dtype": "float32",
    "vocab_size": len(VOCABULARY),
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "attention_bias": False,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "use_cache": True,
    "bos_token_id": None,
    "eos_token_id": END_ID,
    "pad_token_id": PAD_ID,
}
_FIXED_TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "pad_token": PAD,
    "eos_token": END,
    "unk_token": UNKNOWN,
    "clean_up_tokenization_spaces": False,
}


def write_tiny_model(
    directory: Path,
    *,
    hidden: int = 64,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 32,
    intermediate: int = 128,
    max_tokens: int = 4096,
) -> None:
    """Write configuration and tokenizer of a tiny Qwen3 (untied, float32) in Hugging Face layout, without weights.

    One character is one token and nothing is added around a text; a character outside `CHARACTERS` becomes `<unk>`.
    `hidden`, `head_dim` and `intermediate` are widths, `max_tokens` is the longest context. The CPU attention of vLLM
    takes a `head_dim` that is a multiple of 32. Raises ValueError for another one, or when kv_heads
    does not divide heads.
    """
    if head_dim % 32 or heads % kv_heads:
        raise ValueError(
            f"head_dim {head_dim} must be a multiple of 32, heads {heads} a multiple of kv_heads {kv_heads}"
        )
    config = {
        **_FIXED_CONFIG,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": max_tokens,
    }
    tokenizer_config = {**_FIXED_TOKENIZER_CONFIG, "model_max_length": max_tokens}
    directory.mkdir(parents=True, exist_ok=True)
    _write_json(directory / "config.json", config)
    _write_json(directory / "generation_config.json", {"eos_token_id": END_ID, "pad_token_id": PAD_ID})
    _write_json(directory / "tokenizer.json", _tokenizer())
    _write_json(directory / "tokenizer_config.json", tokenizer_config)


def _tokenizer() -> dict[str, Any]:
    """Return the description that the tokenizers library reads: a word-level model over single characters."""
    added = [
        {
            "id": number,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for number, token in enumerate(SPECIAL_TOKENS)
    ]
    vocabulary = {token: number for number, token in enumerate(VOCABULARY)}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {"type": "Split", "pattern": {"Regex": "[\\s\\S]"}, "behavior": "Isolated", "invert": False},
        "post_processor": None,
        "decoder": {"type": "Fuse"},
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": UNKNOWN},
    }


def _write_json(path: Path, content: dict[str, Any]) -> None:
    replace_text(path, json.dumps(content, indent=1, sort_keys=True) + "\n")  # ranks of one node write it at once
