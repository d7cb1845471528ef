"""The policy's directory at a site: configuration, tokenizer and, where there are any, weights."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetrl.describe.experiment import Model
from hetrl.errors import UsageError
from hetrl.runtime.weights.tiny_model import write_tiny_model
from hetrl.workload import Architecture

TINY = "tiny-qwen3"


@dataclass(frozen=True)
class ModelDirectory:
    """`path` holds config.json and the tokenizer, `weights` the safetensors (None: drawn from the seed)."""

    path: Path
    config: dict[str, Any]
    weights: Path | None

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """Return the tokens that end a response: those of generation_config.json, then those of config.json.

        Chat models name the end of a turn in the former only. Raises UsageError where there is none.
        """
        path = self.path / "generation_config.json"
        settings = _json(path) if path.exists() else {}
        found: dict[int, None] = {}
        for value in (settings.get("eos_token_id"), self.config.get("eos_token_id")):
            found |= dict.fromkeys(value if isinstance(value, list) else [] if value is None else [value])
        if not found:
            raise UsageError(f"model: {self.path} names no eos_token_id; responses could never end")
        return tuple(found)

    @property
    def pad_token(self) -> int:
        """Return the token that fills batches: pad_token_id, or the first stop token."""
        pad = self.config.get("pad_token_id")
        return int(pad) if pad is not None else self.stop_tokens[0]


def ensure_model_directory(model: Model, shape: Architecture, scratch: Path) -> ModelDirectory:
    """Return the model's directory, writing the tiny model's into `scratch`; UsageError where there is none."""
    if model.weights is not None:
        return _read(Path(model.weights), weights=True)
    if (Path(model.architecture) / "config.json").is_file():
        return _read(Path(model.architecture), weights=False)
    if model.architecture != TINY:
        raise UsageError(
            f"model.weights: {model.architecture} is only a shape here; give the directory that holds its "
            "config.json, tokenizer and safetensors at every site"
        )
    write_tiny_model(
        scratch,
        hidden=shape.hidden,
        layers=shape.layers,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        intermediate=shape.intermediate,
    )
    return _read(scratch, weights=False)


def _read(directory: Path, *, weights: bool) -> ModelDirectory:
    config = _json(directory / "config.json")
    if weights and not any(directory.glob("*.safetensors")):
        raise UsageError(f"model.weights: {directory} has no *.safetensors")
    return ModelDirectory(directory, config, directory if weights else None)


def _json(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise UsageError(f"model: {path}: {error.strerror}") from None
    except (ValueError, TypeError) as error:
        raise UsageError(f"model: {path} is not JSON ({error})") from None
