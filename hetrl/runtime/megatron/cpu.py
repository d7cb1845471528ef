"""What megatron-core 0.16.1 needs to run on CPUs with gloo; nothing happens where CUDA is there.

Each megatron.core module has a global `torch`. That global, and not torch itself, is replaced by a thin proxy in which
the current CUDA device is the CPU, synchronising does nothing and factories that ask for CUDA make CPU tensors. The
few functions that compare `Tensor.type()` with CUDA names run with those names answered. All else is upstream code.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from hetrl.errors import HetrlError

VERSION = "0.16.1"
_CPU = torch.device("cpu")
_MARK = "__hetrl_cpu__"

_FACTORIES = (
    *("empty", "zeros", "ones", "full", "tensor", "arange", "rand", "randn", "as_tensor"),
    *("empty_like", "zeros_like", "ones_like", "full_like"),
)
# Modules that import others lazily: they must be there before their `torch` is replaced.
_MODULES = (
    "megatron.core.models.gpt",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.pipeline_parallel.schedules",
    "megatron.core.distributed",
    "megatron.core.optimizer",
    "megatron.core.tensor_parallel.data",
)
# Functions that compare Tensor.type() with "torch.cuda.*" or call Tensor.cuda().
_CUDA_NAMED = (
    ("megatron.core.optimizer.optimizer", "clip_grad_by_total_norm_fp32"),
    ("megatron.core.optimizer.clip_grads", "clip_grad_by_total_norm_fp32"),
    ("megatron.core.optimizer.distrib_optimizer", "DistributedOptimizer.__init__"),
    ("megatron.core.optimizer.distrib_optimizer", "DistributedOptimizer.get_parameter_state_dp_zero"),
    ("megatron.core.optimizer.optimizer", "Float16OptimizerWithFloat16Params.__init__"),
    ("megatron.core.models.common.language_module.language_module", "LanguageModule.setup_embeddings_and_output_layer"),
    ("megatron.core.tensor_parallel.data", "broadcast_data"),
)
# `from torch.cuda import ...` escapes the proxy: these two accessors of the generator state are replaced themselves.
_RANDOM = "megatron.core.tensor_parallel.random"
_GENERATOR_STATE: dict[str, Callable[..., Any]] = {
    "_get_cuda_rng_state": lambda *args, **kwargs: torch.get_rng_state(),
    "_set_cuda_rng_state": lambda state, *args, **kwargs: torch.set_rng_state(state),
}
# What torch.cuda is to megatron: its one device and one generator are those of the CPU.
_CUDA: dict[str, Callable[..., Any]] = {
    "current_device": lambda: _CPU,
    "synchronize": lambda *args, **kwargs: None,
    "empty_cache": lambda: None,
    "get_rng_state": _GENERATOR_STATE["_get_cuda_rng_state"],
    "set_rng_state": _GENERATOR_STATE["_set_cuda_rng_state"],
    "manual_seed": torch.manual_seed,
}


class _Proxy(types.ModuleType):
    """A module in which some names are replaced."""

    def __init__(self, module: types.ModuleType, names: Mapping[str, Any]) -> None:
        super().__init__(module.__name__)
        self.__dict__.update(names)
        self.__wrapped__ = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__wrapped__, name)


@contextlib.contextmanager
def uncompiled() -> Iterator[None]:
    """Import megatron-core in the block without torch's compiler where there is no CUDA: all runs eagerly there.

    megatron-core compiles a dozen functions (`megatron.core.jit`). Saying so imports the compiler, which is a quarter
    of what a rank imports.
    """
    if torch.cuda.is_available():
        yield
        return
    compiles = torch.compile
    torch.compile = _as_written  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.compile = compiles


def _as_written(function: Any = None, **options: Any) -> Any:
    """Stand in for `torch.compile`, with or without options."""
    return (lambda one: one) if function is None else function


def install() -> bool:
    """Make megatron-core work on the CPU and return True; return False where CUDA is there.

    May be called again. Raises HetrlError when the version of megatron-core is another one, or when a name that is
    replaced does not exist.
    """
    _check_version()
    if torch.cuda.is_available():
        return False
    torch.compiler.set_stance("force_eager")
    with uncompiled():
        for name in _MODULES:
            importlib.import_module(name)
    factories = {name: _on_cpu(getattr(torch, name)) for name in _FACTORIES}
    proxy = _Proxy(torch, {"cuda": _Proxy(torch.cuda, _CUDA), **factories})
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.core") and module is not None and module.__dict__.get("torch") is torch:
            module.__dict__["torch"] = proxy
    for module_name, path in _CUDA_NAMED:
        _replace(module_name, path, _with_cuda_names)
    random = importlib.import_module(_RANDOM)
    for name, function in _GENERATOR_STATE.items():
        _existing(_RANDOM, name)
        setattr(random, name, function)
    logging.getLogger(_RANDOM).addFilter(_not_about_generator)
    return True


def _check_version() -> None:
    """Raise HetrlError unless the pinned megatron-core is installed."""
    try:
        found = importlib.import_module("megatron.core").__version__
    except ImportError as error:
        raise HetrlError(f"megatron-core cannot be imported ({error}); install megatron-core=={VERSION}") from error
    if found != VERSION:
        raise HetrlError(f"megatron-core {found} is installed, hetrl is made for {VERSION}; install that one")


def _not_about_generator(record: logging.LogRecord) -> bool:
    return "CPU RNG state changed" not in record.getMessage()


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a factory of tensors: CUDA devices become the CPU, pinned memory plain memory."""

    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> Any:
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = _CPU
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return make


@contextlib.contextmanager
def _cuda_names() -> Iterator[None]:
    """While active, CPU tensors answer Tensor.type() and Tensor.cuda() as CUDA tensors do."""
    plain_type, plain_cuda = torch.Tensor.type, torch.Tensor.cuda
    if getattr(plain_type, _MARK, False):
        yield
        return

    def named(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is None and not args and not kwargs:
            return plain_type(self).replace("torch.", "torch.cuda.", 1)
        return plain_type(self, dtype, *args, **kwargs)

    setattr(named, _MARK, True)
    torch.Tensor.type = named  # type: ignore[method-assign, assignment]
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.Tensor.type = plain_type  # type: ignore[method-assign]
        torch.Tensor.cuda = plain_cuda  # type: ignore[method-assign]


def _with_cuda_names(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function so that it runs under `_cuda_names`."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with _cuda_names():
            return function(*args, **kwargs)

    return run


def _existing(module_name: str, path: str) -> tuple[Any, str]:
    """Return the owner (module or class) and the last name of a dotted path; HetrlError when it does not exist."""
    owner: Any = importlib.import_module(module_name)
    *outer, name = path.split(".")
    for part in outer:
        owner = getattr(owner, part, None)
    if owner is None or name not in vars(owner):
        raise HetrlError(f"megatron-core {VERSION}: {module_name} has no {path}, which the CPU support replaces")
    return owner, name


def _replace(module_name: str, path: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Wrap the function at a path once; class and static methods stay what they are."""
    owner, name = _existing(module_name, path)
    raw = vars(owner)[name]
    method = isinstance(raw, (classmethod, staticmethod))
    function = raw.__func__ if method else raw
    if getattr(function, _MARK, False):
        return
    wrapped = wrap(function)
    setattr(wrapped, _MARK, True)
    setattr(owner, name, type(raw)(wrapped) if method else wrapped)
