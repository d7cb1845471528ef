"""What a CUDA device of a CPU build of torch answers: CUDA tensors are fake, all others are real.

`install` once per process, after `library.load`; then everything inside `FakeCuda()` sees eight devices. A fake tensor
has a shape, a type and a device, no data: what is read from one is 1. Collectives of a world end at once.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakIdKeyDictionary

CUDA = torch.device("cuda", 0)
DEVICES = 8
MEMORY_BYTES = 80 * 10**9
SMALL = 2**16  # values, enough for the state of a generator
LARGE = 2**24  # values; what the host gets of more is left unwritten: it would be memory that is not there
BLOCK_BYTES = 512  # what torch's allocator rounds up to (c10/cuda/CUDACachingAllocator.h, kMinBlockSize)
_aten = torch.ops.aten
_TYPE_NAMES = {
    torch.float32: "Float",
    torch.bfloat16: "BFloat16",
    torch.float16: "Half",
    torch.int32: "Int",
    torch.int64: "Long",
    torch.bool: "Bool",
    torch.uint8: "Byte",
}


class FakeCuda(TorchDispatchMode):
    """While active, CUDA tensors are fake; a tensor on the CPU that meets one fails, as on a GPU.

    `held_bytes` are those of the tensors that live, `peak_bytes` the most so far; `active` is the one that is entered.
    """

    active: FakeCuda

    def __init__(self) -> None:
        super().__init__()
        FakeCuda.active = self
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._known = WeakIdKeyDictionary()  # storage -> [bytes]
        self._values = WeakIdKeyDictionary()  # storage -> what the host wrote into it
        self.held_bytes = self.peak_bytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = self._run(function, args, kwargs or {})
        for leaf in tree_leaves(result):
            if isinstance(leaf, FakeTensor):
                self._hold(leaf.untyped_storage())
        return result

    def _hold(self, storage: torch.UntypedStorage) -> None:
        """Count a storage until it goes."""
        if storage not in self._known:
            self._known[storage] = size = [0]  # of bytes; the list outlives the storage
            weakref.finalize(storage, self._count, size, 0)
        self._count(self._known[storage], storage.nbytes())

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Count a storage that has another size now."""
        if storage in self._known:
            self._count(self._known[storage], storage.nbytes())

    def _count(self, size: list[int], now: int) -> None:
        """Note what a storage takes now, in whole blocks of the allocator."""
        whole = -(-now // BLOCK_BYTES) * BLOCK_BYTES
        self.held_bytes += whole - size[0]
        size[0] = whole
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)

    def _run(self, function: Any, args: Any, kwargs: Any) -> Any:
        on_device = any(isinstance(leaf, FakeTensor) for leaf in tree_leaves((args, kwargs)))
        target = None if kwargs.get("device") is None else torch.device(kwargs["device"]).type
        if not on_device and target != "cuda":
            return _on_host(function, args, kwargs)
        if function is _aten._local_scalar_dense.default:
            return self._read(args[0]).item()
        if function is _aten._to_copy.default and target == "cpu":
            return self._read(args[0]).to(kwargs.get("dtype") or args[0].dtype, copy=True)
        if function is _aten.copy_.default and not isinstance(args[0], FakeTensor):
            return args[0] if args[0].numel() > LARGE else args[0].copy_(self._read(args[1]))
        if function is _aten._to_copy.default and not on_device:
            return self._upload(args[0], kwargs.get("dtype") or args[0].dtype)
        if function._schema.is_mutable and function.namespace == "aten":
            for written in tree_leaves(args[0]):  # a list, where one kernel does many tensors
                self._values.pop(written.untyped_storage(), None)
            if function is _aten.copy_.default and not isinstance(args[1], FakeTensor):
                return args[0]
        with self._fake:
            return function(*args, **kwargs)

    def _upload(self, host: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor of the device; of a small one the values are known until something is written into it."""
        with self._fake:
            tensor = torch.empty(host.shape, dtype=dtype, device=CUDA)
        if host.numel() <= SMALL:
            self._values[tensor.untyped_storage()] = host.detach().to(dtype, copy=True)
        return tensor

    def _read(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return what the host sees of a tensor: its values where they are known, else ones."""
        known = self._values.get(tensor.untyped_storage())
        if known is not None and known.shape == tensor.shape:
            return known
        return torch.ones(tensor.shape, dtype=tensor.dtype)


def _on_host(function: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Run an operation of the CPU; its memory is pinned in name only."""
    if function is _aten._pin_memory.default:
        return args[0].clone()
    if function is _aten.is_pinned.default:
        return True
    return function(*args, **{key: value for key, value in kwargs.items() if key != "pin_memory"})


class _Stream:
    """The one stream of a device, whose work is done."""

    device, cuda_stream = CUDA, 0

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name in ("wait_stream", "wait_event", "synchronize", "record_event", "query"):
            return lambda *args, **kwargs: _Event() if name == "record_event" else None
        raise AttributeError(name)


class _Event:
    """Something that has happened."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name in ("record", "wait", "synchronize", "query", "elapsed_time"):
            return lambda *args, **kwargs: 1.0
        raise AttributeError(name)


def install() -> None:
    """Let torch.cuda and torch's factories of this process answer for the fake device."""
    _answer_for_cuda()
    _answer_for_storages()
    _answer_for_factories()
    _answer_for_kernels()


def _answer_for_cuda() -> None:
    properties = SimpleNamespace(
        name="fake", total_memory=MEMORY_BYTES, major=9, minor=0, multi_processor_count=132, warp_size=32
    )
    generators = tuple(torch.Generator() for _ in range(DEVICES))
    answers: dict[str, Any] = {  # no two alike: torch's compiler wants a rule for each function
        "_lazy_init": lambda: None,
        "_lazy_call": lambda call, **_: call(),
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "current_device": lambda: 0,
        "device_count": lambda: DEVICES,
        "set_device": lambda _: None,
        "synchronize": lambda *_: None,
        "empty_cache": lambda: None,
        "get_device_properties": lambda *_: properties,
        "get_device_capability": lambda *_: (properties.major, properties.minor),
        "mem_get_info": lambda *_: (MEMORY_BYTES, MEMORY_BYTES),
        "current_stream": lambda *_: _Stream(),
        "default_stream": lambda *_: _Stream(),
        "stream": lambda *_: contextlib.nullcontext(),
        "Stream": lambda *_, **__: _Stream(),
        "Event": _Event,
        "default_generators": generators,
    }
    for module in (torch.cuda, torch.cuda.random):
        for name, answer in answers.items():
            if hasattr(module, name):
                setattr(module, name, answer)


def _answer_for_storages() -> None:
    """Storages that are emptied and filled again are counted."""
    resize = torch.UntypedStorage.resize_

    def resized(self: torch.UntypedStorage, size: int) -> Any:
        result = resize(self, size)
        FakeCuda.active.resized(self)
        return result

    torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign]


def _answer_for_factories() -> None:
    """Constants are made on the host and moved: their C++ never asks Python for the device."""
    torch.tensor = _moved(torch.tensor)  # type: ignore[assignment]
    torch.as_tensor = _moved(torch.as_tensor)  # type: ignore[assignment]
    torch.nn.Module.cuda = _module_cuda  # type: ignore[assignment,method-assign]
    plain_type = torch.Tensor.type

    def type_name(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not args and not kwargs and self.device.type == "cuda":
            return f"torch.cuda.{_TYPE_NAMES[self.dtype]}Tensor"
        return plain_type(self, *args, **kwargs)

    torch.Tensor.type = type_name  # type: ignore[assignment,method-assign]


class _FusedRmsNorm(torch.autograd.Function):
    """torch's kernel for CUDA: it keeps its input and a float per row. A CPU build composes it of float32 tensors."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


def _answer_for_kernels() -> None:
    """Stand in for kernels that only a CUDA build of torch has; what torch compiles runs as it is written."""
    torch.compiler.set_stance("force_eager")
    composed = torch.nn.functional.rms_norm

    def rms_norm(x: torch.Tensor, shape: Any, weight: Any = None, eps: float | None = None) -> torch.Tensor:
        fused = isinstance(x, FakeTensor) and weight is not None
        return _FusedRmsNorm.apply(x, weight) if fused else composed(x, shape, weight, eps)  # type: ignore[no-any-return]

    torch.nn.functional.rms_norm = rms_norm  # type: ignore[assignment]


def _moved(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def make(data: Any, *args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
        if isinstance(data, FakeTensor):
            return data.to(device=device or data.device, dtype=kwargs.get("dtype") or data.dtype)
        read = tree_map(lambda leaf: leaf.item() if isinstance(leaf, FakeTensor) else leaf, data)
        made = factory(read, *args, **kwargs)
        return made if device is None else made.to(device)

    return make


def _module_cuda(self: torch.nn.Module, device: Any = None) -> torch.nn.Module:
    """Move what is on the host: a real parameter cannot take a fake tensor as its data."""
    for module in self.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and not parameter.is_cuda:
                module._parameters[name] = torch.nn.Parameter(parameter.detach().to(CUDA), parameter.requires_grad)
        for name, buffer in module._buffers.items():
            if buffer is not None and not buffer.is_cuda:
                module._buffers[name] = buffer.to(CUDA)
    return self
