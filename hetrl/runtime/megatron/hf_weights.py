"""Hugging Face weights and where each of them lives in a megatron-core model.

Every Hugging Face tensor is one *window* (a strided view) of one megatron parameter, cut along at most one dimension
for tensor parallelism. So a model is loaded and exported tensor by tensor:

    load(name, full):  window(parameter) <- shard(full, rank)          on every rank of the stage that owns it
    export(name):      full <- merge(window(parameter) of each rank)

Megatron's shapes: linear_qkv holds per KV group its query heads, its key head, its value head; linear_fc1 holds per
tensor rank [gate; up] (megatron/core/transformer/attention.py and mlp.py, version 0.16.1).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from hetrl.errors import HetrlError, UsageError
from hetrl.runtime.megatron.layout import Layout
from hetrl.runtime.megatron.slices import Box, Runs, indices, size_of, whole
from hetrl.workload import SCALAR_CLASS, Architecture, architecture_from_hf_config

EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
LANGUAGE_HEAD, SCALAR_HEAD = "lm_head.weight", "score.weight"


@dataclass(frozen=True)
class Home:
    """Where one Hugging Face tensor of `shape` lives.

    `parameter` is megatron's name with the global layer index, `layer` that index (None: outside the layers), `part`
    the window in it (whole, q, k, v, gate, up), `split` the dimension that tensor parallelism cuts (None: every rank
    holds all). A tied embedding has a second home `twin` on the last stage of a pipeline.
    """

    parameter: str
    shape: tuple[int, ...]
    split: int | None = None
    part: str = "whole"
    layer: int | None = None
    twin: str | None = None


def architecture_of(config: Mapping[str, Any]) -> Architecture:
    """Return the shapes in a `config.json`; raises UsageError for what the training engine does not compute."""
    name = str(config.get("_name_or_path") or config.get("model_type"))
    result = architecture_from_hf_config(config, name)
    wrong = {
        "hidden_act": config.get("hidden_act", "silu") != "silu",
        "attention_bias": bool(config.get("attention_bias")),
        "mlp_bias": bool(config.get("mlp_bias")),
        "use_sliding_window": bool(config.get("use_sliding_window")),
        "attention_dropout": bool(config.get("attention_dropout")),
    }
    for key in (key for key, is_wrong in wrong.items() if is_wrong):
        raise UsageError(f"{name}: {key} = {config[key]!r} in config.json is not supported by the training engine")
    return result


def homes(architecture: Architecture) -> dict[str, Home]:
    """Return the home of every tensor of a model by its Hugging Face name, in the order of export."""
    hidden, vocabulary = architecture.hidden, (architecture.vocabulary, architecture.hidden)
    twin = OUTPUT if architecture.tied_embeddings else None
    result = {"model.embed_tokens.weight": Home(EMBEDDING, vocabulary, split=0, twin=twin)}
    for layer in range(architecture.layers):
        result |= _layer_homes(architecture, layer)
    result["model.norm.weight"] = Home("decoder.final_layernorm.weight", (hidden,))
    if architecture.scalar_head:
        result[SCALAR_HEAD] = Home(OUTPUT, (1, hidden))
    elif not architecture.tied_embeddings:
        result[LANGUAGE_HEAD] = Home(OUTPUT, vocabulary, split=0)
    return result


def with_scalar_head(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `config.json` of the value model that shares the layers of a model."""
    family = {"qwen2": "Qwen2", "qwen3": "Qwen3", "llama": "Llama"}[config["model_type"]]
    labels = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}  # how transformers counts the outputs
    return {**config, "architectures": [family + SCALAR_CLASS], **labels}


def _layer_homes(architecture: Architecture, layer: int) -> dict[str, Home]:
    """Return the homes of one layer."""
    a, there, here = architecture, f"decoder.layers.{layer}.", f"model.layers.{layer}."
    attention, feed_forward = there + "self_attention.", there + "mlp."
    rows = {"q": a.heads * a.head_dim, "k": a.kv_heads * a.head_dim, "v": a.kv_heads * a.head_dim}
    result = {"input_layernorm.weight": Home(there + "input_layernorm.weight", (a.hidden,), layer=layer)}
    for part, length in rows.items():
        qkv = f"self_attn.{part}_proj."
        result[qkv + "weight"] = Home(attention + "linear_qkv.weight", (length, a.hidden), 0, part, layer)
        if a.qkv_bias:
            result[qkv + "bias"] = Home(attention + "linear_qkv.bias", (length,), 0, part, layer)
    for part in ("q", "k") if a.qk_norm else ():
        norm = f"self_attn.{part}_norm.weight"
        result[norm] = Home(attention + f"{part}_layernorm.weight", (a.head_dim,), layer=layer)
    result["self_attn.o_proj.weight"] = Home(attention + "linear_proj.weight", (a.hidden, rows["q"]), 1, layer=layer)
    result["post_attention_layernorm.weight"] = Home(there + "pre_mlp_layernorm.weight", (a.hidden,), layer=layer)
    wide, narrow = (a.intermediate, a.hidden), (a.hidden, a.intermediate)
    for part in ("gate", "up"):
        result[f"mlp.{part}_proj.weight"] = Home(feed_forward + "linear_fc1.weight", wide, 0, part, layer)
    result["mlp.down_proj.weight"] = Home(feed_forward + "linear_fc2.weight", narrow, 1, layer=layer)
    return {here + name: home for name, home in result.items()}


def stage_of(home: Home, layout: Layout) -> int:
    """Return the pipeline stage that owns a tensor (of a tied embedding: the first)."""
    if home.layer is None:
        return 0 if home.parameter == EMBEDDING else layout.pipeline - 1
    return next(i for i, (start, end) in enumerate(layout.stages) if start <= home.layer < end)


def padded(length: int, tensor: int) -> int:
    """Return `length` rounded up to a multiple of the tensor-parallel degree (only a vocabulary needs it)."""
    return -(-length // tensor) * tensor


def window(parameter: torch.Tensor, home: Home, architecture: Architecture) -> torch.Tensor:
    """Return the view of one tensor rank's `parameter` that holds this rank's shard, in any shape with its elements."""
    if home.part in ("gate", "up"):
        return parameter.view(2, -1, *parameter.shape[1:])[("gate", "up").index(home.part)]
    if home.part == "whole":
        return parameter
    queries = architecture.heads // architecture.kv_heads
    groups = parameter.view(-1, queries + 2, architecture.head_dim, *parameter.shape[1:])
    bounds = {"q": (0, queries), "k": (queries, queries + 1), "v": (queries + 1, queries + 2)}
    start, end = bounds[home.part]
    return groups[:, start:end]


def runs(home: Home, held: Box, parameter: Sequence[int], architecture: Architecture) -> Runs:
    """Return where in the flattened parameter of this shape the tensor stands of which a rank holds the box `held`.

    The elements come in the order of the flattened box; it is `window` in numbers, without the padding.
    """
    size = size_of(held)
    if home.part == "whole":
        return Runs(0, size, size, 1) if size else Runs(0, 0, 1, 0)
    if home.part in ("gate", "up"):
        return Runs(("gate", "up").index(home.part) * size, size, size, 1)
    queries = architecture.heads // architecture.kv_heads
    head = architecture.head_dim * math.prod(parameter[1:])
    first, heads = {"q": (0, queries), "k": (queries, 1), "v": (queries + 1, 1)}[home.part]
    return Runs(first * head, heads * head, (queries + 2) * head, size // (heads * head))


def box_of(home: Home, rank: int, tensor: int) -> Box:
    """Return which part of a whole tensor the tensor rank `rank` of `tensor` holds, without padding."""
    box = list(whole(home.shape))
    if home.split is not None:
        length = home.shape[home.split]
        each = padded(length, tensor) // tensor
        start = min(rank * each, length)
        box[home.split] = (start, min(start + each, length))
    return tuple(box)


def shard(full: torch.Tensor, home: Home, rank: int, tensor: int) -> torch.Tensor:
    """Return what tensor rank `rank` of `tensor` holds of `full`, as a view without padding."""
    return full[indices(box_of(home, rank, tensor), whole(home.shape))]


def write(parameter: torch.Tensor, part: torch.Tensor, home: Home, architecture: Architecture) -> None:
    """Copy one rank's shard into its window; padded rows of a vocabulary become zero."""
    target = window(parameter, home, architecture)
    if home.part != "whole":
        target.copy_(part.reshape(target.shape))
        return
    target[: part.shape[0]].copy_(part)
    target[part.shape[0] :].zero_()


def read(parameter: torch.Tensor, home: Home, architecture: Architecture) -> torch.Tensor:
    """Return one rank's shard, contiguous; a vocabulary comes with its padding."""
    return window(parameter, home, architecture).reshape(-1, *parameter.shape[1:]).contiguous()


def merge(parts: Sequence[torch.Tensor], home: Home) -> torch.Tensor:
    """Join the shards of all tensor ranks, in rank order, to the full tensor without padding."""
    if home.split is None:
        return parts[0]
    full = parts[0] if len(parts) == 1 else torch.cat(list(parts), home.split)
    return full.narrow(home.split, 0, home.shape[home.split]).contiguous()


def read_config(directory: str | Path) -> dict[str, Any]:
    """Read `config.json` of a model directory; raises UsageError when it is missing or not a JSON object."""
    path = Path(directory) / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"{directory}: no config.json there; give a directory with a Hugging Face model") from None
    except ValueError as error:
        raise UsageError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(config, dict):
        raise UsageError(f"{path}: expected an object, found {type(config).__name__}")
    return config


def iter_safetensors(source: str | Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a file or a model directory one by one, in the order of the files and their names.

    Of a directory, reads `model.safetensors`, or the files that `model.safetensors.index.json` names. Raises UsageError
    when neither is there or one cannot be read.
    """
    for path in safetensors_files(Path(source)):
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                for name in sorted(file.keys()):
                    yield name, file.get_tensor(name)
        except (SafetensorError, FileNotFoundError) as error:
            raise UsageError(f"{path}: cannot be read ({error}); download or write the weights again") from error


def safetensors_files(directory: Path) -> list[Path]:
    """Return the files of a model in a directory, or the one file that is named itself; UsageError without any."""
    if directory.is_file():
        return [directory]
    single, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if index.is_file():
        files = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        return [directory / name for name in sorted(set(files))]
    raise UsageError(f"{directory}: neither {single.name} nor {index.name} is there")


def random_weights(config: Mapping[str, Any], seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield fresh float32 weights of a model under their Hugging Face names.

    Matrices are normal with the standard deviation `initializer_range` (0.02 where the configuration has none, the
    default of transformers), a scalar head with 1 / sqrt(hidden + 1) (Huang et al., arXiv 2403.17031, detail 11), norms
    one, biases zero. Each tensor depends on its name and `seed` alone, so every layout starts from the same model.
    """
    deviation = float(config.get("initializer_range", 0.02))
    architecture = architecture_of(config)
    for name, home in homes(architecture).items():
        if name.endswith("bias"):
            yield name, torch.zeros(home.shape)
        elif len(home.shape) == 1:
            yield name, torch.ones(home.shape)
        elif name == SCALAR_HEAD:
            yield name, random_head(architecture, seed)
        else:
            yield name, _drawn(name, home.shape, deviation, seed)


def random_head(architecture: Architecture, seed: int) -> torch.Tensor:
    """Return a fresh scalar head [1, hidden], as `random_weights` gives it."""
    return _drawn(SCALAR_HEAD, (1, architecture.hidden), (architecture.hidden + 1) ** -0.5, seed)


def _drawn(name: str, shape: tuple[int, ...], deviation: float, seed: int) -> torch.Tensor:
    return torch.empty(shape).normal_(0.0, deviation, generator=_generator(name, seed))


def _generator(name: str, seed: int) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def passed_over(name: str, wanted: Mapping[str, Home]) -> bool:
    """Return whether a model needs no such tensor, which a file may have all the same.

    That is the language head where it is tied or has given way to a scalar one, and rotary frequencies of an old
    checkpoint.
    """
    return name.endswith("rotary_emb.inv_freq") or (name == LANGUAGE_HEAD and name not in wanted)


def missing_and_surplus(arrived: set[str], wanted: Mapping[str, Home]) -> None:
    """Raise HetrlError when tensors are missing or unknown, naming the first of them."""
    for kind, names in (("missing", wanted.keys() - arrived), ("unknown to this model", arrived - wanted.keys())):
        if names:
            shown = ", ".join(sorted(names)[:5]) + (", ..." if len(names) > 5 else "")
            raise HetrlError(
                f"weights: {len(names)} tensors are {kind}: {shown}; do config.json and weights belong together?"
            )
