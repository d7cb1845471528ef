"""Turn pydantic's errors into one line per mistake: where, what, and the nearest known key."""

from __future__ import annotations

from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from hetrl.errors import nearest


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
