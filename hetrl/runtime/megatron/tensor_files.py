"""Safetensors files of which a rank reads the parts that it needs, and the files of a model or checkpoint as one.

    optimizer.index.json    {"exp_avg": {"model.norm.weight": {"0:32": "optimizer-rank-00000.safetensors", ...}, ...}}

says which file holds which box of which tensor; the file has it as `exp_avg/model.norm.weight[0:32]`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from hetrl.errors import HetrlError, UsageError
from hetrl.runtime.checkpoints.files import PIECES_INDEX
from hetrl.runtime.megatron import hf_weights, slices
from hetrl.runtime.megatron.slices import Box

_NAME = re.compile(r"(?P<kind>\w+)/(?P<name>[^\[]+)\[(?P<box>[^\]]+)\]")
Index = dict[str, dict[str, dict[str, str]]]  # kind, Hugging Face name, box, file


class TensorFiles:
    """Opens safetensors files as they are asked for and closes them together; only headers and slices are read."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._open: dict[Path, Any] = {}

    def __enter__(self) -> TensorFiles:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.clear()
        self._stack.close()

    def names(self, path: Path) -> list[str]:
        """Return the names in a file; UsageError when it cannot be read."""
        return list(self._file(path).keys())

    def shape(self, path: Path, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor of a file; UsageError when it cannot be read."""
        return tuple(self._slice(path, name).get_shape())

    def read(self, path: Path, name: str, box: Box | None = None) -> torch.Tensor:
        """Return a part of a tensor of a file, all of it without a box; UsageError when it cannot be read."""
        found = self._slice(path, name)
        box = slices.whole(found.get_shape()) if box is None else box
        try:
            tensor: torch.Tensor = found[tuple(slice(start, stop) for start, stop in box)]
        except SafetensorError as error:
            raise _unreadable(path, error) from error
        return tensor

    def _slice(self, path: Path, name: str) -> Any:
        try:
            return self._file(path).get_slice(name)
        except SafetensorError as error:
            raise _unreadable(path, error) from error

    def _file(self, path: Path) -> Any:
        if path not in self._open:
            try:
                self._open[path] = self._stack.enter_context(safe_open(path, framework="pt", device="cpu"))
            except (SafetensorError, OSError) as error:
                raise _unreadable(path, error) from error
        return self._open[path]


def _unreadable(path: Path, error: Exception) -> UsageError:
    return UsageError(f"{path}: cannot be read ({error}); download or write it again")


class ModelFiles:
    """The whole tensors of a Hugging Face directory, or of one file; a source of parts of them."""

    def __init__(self, source: Path, files: TensorFiles) -> None:
        """Find out which file has which tensor; UsageError when there are no weights or they cannot be read."""
        self._files = files
        paths = hf_weights.safetensors_files(source)
        self._path_of = {name: path for path in paths for name in files.names(path)}

    @property
    def names(self) -> set[str]:
        """Return the names of all tensors."""
        return set(self._path_of)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a whole tensor."""
        return self._files.shape(self._path_of[name], name)

    def read(self, name: str, box: Box) -> torch.Tensor:
        """Return the part of a tensor in a box."""
        return self._files.read(self._path_of[name], name, box)


class Pieces:
    """One kind of values (`weights`, a moment) that the ranks of a checkpoint wrote in pieces; a source of parts."""

    def __init__(self, directory: Path, index: Index, kind: str, files: TensorFiles) -> None:
        self._files, self._kind = files, kind
        self._pieces = {
            name: {slices.parse(box): directory / file for box, file in pieces.items()}
            for name, pieces in index[kind].items()
        }

    @property
    def names(self) -> set[str]:
        """Return the names of all tensors."""
        return set(self._pieces)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a whole tensor: its pieces leave nothing out (see `index_of`)."""
        return tuple(max(ends) for ends in zip(*([end for _, end in box] for box in self._pieces[name]), strict=True))

    def read(self, name: str, box: Box) -> torch.Tensor:
        """Return the part of a tensor in a box, in float32, put together from the pieces that overlap it."""
        result = torch.empty(slices.shape_of(box), dtype=torch.float32)
        for piece, path in self._pieces[name].items():
            common = slices.overlap(piece, box)
            if common is not None:
                part = self._files.read(path, name_of(self._kind, name, piece), slices.inside(common, _origin(piece)))
                result[slices.indices(common, box)] = part
        return result


def _origin(piece: Box) -> Box:
    """Return a box from whose beginning positions inside of `piece` count."""
    return tuple((-start, -start) for start, _ in piece)


def name_of(kind: str, name: str, box: Box) -> str:
    """Return the name that a piece has in its file."""
    return f"{kind}/{name}[{slices.text(box)}]"


def read_index(directory: Path) -> Index:
    """Return the index of a checkpoint's pieces; HetrlError when it cannot be read."""
    path = directory / PIECES_INDEX
    try:
        index: Index = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise HetrlError(f"{path}: cannot be read ({error}); take an older checkpoint") from error
    return index


def index_of(paths: Iterable[Path], shapes: Mapping[str, tuple[int, ...]], kinds: Iterable[str]) -> Index:
    """Return the index of the pieces in the files of all ranks, from the headers of the files.

    Raises HetrlError when a file is missing or cut off, or when the pieces of a tensor do not fill it.
    """
    index: Index = {kind: {name: {} for name in shapes} for kind in kinds}
    for path in paths:
        for match in filter(None, map(_NAME.fullmatch, _names(path))):
            index[match["kind"]][match["name"]][match["box"]] = path.name
    for kind, tensors in index.items():
        for name, boxes in tensors.items():
            held, wanted = (
                sum(slices.size_of(slices.parse(box)) for box in boxes),
                slices.size_of(slices.whole(shapes[name])),
            )
            if held != wanted:
                raise HetrlError(f"{kind} of {name}: the ranks wrote {held} of {wanted} values")
    return index


def model_index_of(paths: Iterable[Path]) -> dict[str, Any]:
    """Return the index of whole tensors in several files, in the form that transformers loads.

    Raises HetrlError when a file is missing or cut off.
    """
    placed = {name: path for path in paths for name in _names(path)}
    total = sum(path.stat().st_size for path in set(placed.values()))
    return {"metadata": {"total_size": total}, "weight_map": {name: placed[name].name for name in sorted(placed)}}


def _names(path: Path) -> list[str]:
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            return list(file.keys())
    except (SafetensorError, OSError) as error:
        raise HetrlError(f"{path}: not whole ({error})") from error
