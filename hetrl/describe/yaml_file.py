"""Read a YAML file into a pydantic model; every failure is a UsageError that names the file and the key.

Pydantic's errors become one line per mistake: where, what, and the nearest known key.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from hetrl.errors import UsageError, nearest

AtLeastOne = Annotated[int, Field(ge=1)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
# Of what directories, jobs and words of a command are named after.
Name = Annotated[str, Field(max_length=100, pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Strict(BaseModel):
    """A section of a file: an unknown key is an error, and so is yes or no where a number is asked for."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @field_validator("*", mode="before")
    @classmethod
    def _not_taken_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse what pydantic would take for 1 or 0."""
        if isinstance(value, bool):
            asked = cls.model_fields[str(info.field_name)].annotation
            if bool not in (asked, *get_args(asked)):
                raise ValueError(f"found {str(value).lower()}, which is not what is asked for")
        return value

    def changed(self, *keys: str) -> list[str]:
        """Return which of these keys have another value than their default."""
        return [key for key in keys if getattr(self, key) != type(self).model_fields[key].default]


Model = TypeVar("Model", bound=BaseModel)


class _Loader(yaml.SafeLoader):
    """YAML as its standard has it (1.2.2, section 3.2.1.1): no key twice, of which PyYAML would take the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Return the mapping of a node whose keys differ."""
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                line = key.start_mark.line + 1
                if key.value in lines:
                    raise _TwiceError(f'the key "{key.value}" is there twice, in lines {lines[key.value]} and {line}')
                lines[key.value] = line
        return super().construct_mapping(node, deep)


class _TwiceError(Exception):
    """A mapping has a key twice."""


def read_mapping(path: Path | Traversable, expected: str = "keys and values") -> dict[Any, Any]:
    """Parse a file that holds a mapping; `expected` is what the error calls it where the file holds something else."""
    try:
        document = yaml.load(path.read_text(encoding="utf-8"), _Loader)  # a SafeLoader
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    except _TwiceError as error:
        raise UsageError(f"{path}: {error}; which of them counts?") from None
    except (yaml.YAMLError, ValueError) as error:  # a date that no calendar has, bytes that are no text
        raise UsageError(f"{path}: not YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise UsageError(f"{path}: lists or mappings lie deeper in one another than can be read") from None
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
    tried = ", ".join(dict.fromkeys(str(base / name) for base in bases))
    raise UsageError(f'{key}: there is no file "{name}"; looked for {tried}')


def explain(error: ValidationError, model: type[BaseModel], where: str) -> str:
    """Return one line per mistake, `file: key: what is wrong`."""
    return "\n".join(_line(detail, model, where) for detail in error.errors())


def _line(detail: Any, model: type[BaseModel], where: str) -> str:
    location = detail["loc"]
    key = ".".join(str(part) for part in location)
    if detail["type"] == "extra_forbidden":
        known = _known_keys(model, location[:-1])
        hint = nearest(str(location[-1]), known) or f"; known keys: {', '.join(sorted(known))}"
        return f'{where}: unknown key "{key}"{hint}'
    if detail["type"] == "missing":
        return f'{where}: the key "{key}" is missing'
    message = detail["msg"].removeprefix("Value error, ")
    return f"{where}: {key}: {message}" if key else f"{where}: {message}"


def _known_keys(model: type[BaseModel], location: tuple[Any, ...]) -> set[str]:
    """Follow a location through nested models to the keys that are allowed there."""
    current: type[BaseModel] | None = model
    for part in location:
        if isinstance(part, int) or current is None:
            continue
        by_key = {field.alias or name: field for name, field in current.model_fields.items()}
        if part in by_key:
            current = _model_in(by_key[part].annotation)
    return {field.alias or name for name, field in current.model_fields.items()} if current else set()


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """Find the model inside an annotation such as `list[Model] | None`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for inner in get_args(annotation):
        if (found := _model_in(inner)) is not None:
            return found
    return None
