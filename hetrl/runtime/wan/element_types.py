"""Which types of elements an operation across sites takes, and as which they travel."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from hetrl.errors import UsageError
from hetrl.runtime.wan.all_reduce import REDUCTIONS

# What torch adds, multiplies and compares on the CPU, and gloo or a type in `_CARRIERS` does, too.
REDUCIBLE = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)
# gloo sums no int16, and nothing sums booleans: these travel as a type that both can, with the same result.
_CARRIERS = {torch.bool: torch.uint8, torch.int16: torch.int32}
_OF_BOOLEANS = {dist.ReduceOp.SUM: dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT: dist.ReduceOp.MIN}


def carried(tensor: torch.Tensor, reduction: Any) -> tuple[Any, torch.dtype]:
    """Return the reduction, and the type in which the elements travel; raises UsageError where there is none."""
    kind = next((known for known in REDUCTIONS if reduction == known), None)
    if kind is None:
        raise unsupported(f"a reduction with {getattr(reduction, 'op', reduction).name}")
    if tensor.dtype not in REDUCIBLE:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in REDUCIBLE)
        raise UsageError(f"wan: {tensor.dtype} cannot be reduced; convert the tensor to one of {known}")
    if kind == dist.ReduceOp.AVG and not tensor.is_floating_point():
        raise UsageError(f"wan: the average of {tensor.dtype} is not one; use SUM, or a floating-point type")
    if tensor.dtype == torch.bool:
        kind = _OF_BOOLEANS.get(kind, kind)
    return kind, _CARRIERS.get(tensor.dtype, tensor.dtype)


def check_carried(tensor: torch.Tensor) -> None:
    """Raise UsageError for a tensor that is not a plain array of elements: sparse, quantised, without memory."""
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type not in ("cpu", "cuda"):
        kind = f"{tensor.layout}, {tensor.dtype}, on {tensor.device.type}"
        raise UsageError(f"wan: a tensor of {kind} does not cross sites; pass a dense one on cpu or cuda")


def unsupported(what: str) -> UsageError:
    """Return the error for what groups across sites do not do."""
    return UsageError(
        f"wan: {what} is not supported across sites; use a group inside one site, or send, recv, broadcast, "
        "all_reduce, all_gather, reduce_scatter and barrier"
    )
