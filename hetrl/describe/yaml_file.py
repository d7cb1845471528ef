"""Read a YAML file into a pydantic model; every failure is a UsageError that names the file and the key."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from hetrl.describe.validation import explain
from hetrl.errors import UsageError


class Strict(BaseModel):
    """A section of a file: an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)


Model = TypeVar("Model", bound=BaseModel)


def read_mapping(path: Path | Traversable, expected: str = "keys and values") -> dict[Any, Any]:
    """Parse a file that holds a mapping; `expected` is what the error calls it where the file holds something else."""
    try:
        document = yaml.safe_load(path.read_text())
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(document, dict):
        raise UsageError(f"{path}: expected {expected}, found {type(document).__name__}")
    return document


def read_yaml(path: Path, model: type[Model]) -> Model:
    """Parse and validate a file."""
    document = read_mapping(path)
    try:
        return model.model_validate(document)
    except ValidationError as error:
        raise UsageError(explain(error, model, str(path))) from None


def find(name: str, bases: Sequence[Path], key: str) -> Path:
    """Return the first existing `base/name`; raises UsageError that says where it was looked for."""
    for base in bases:
        if (base / name).exists():
            return base / name
    tried = ", ".join(str(base / name) for base in bases)
    raise UsageError(f'{key}: there is no file "{name}"; looked for {tried}')
