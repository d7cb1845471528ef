"""One transformer layer in plain torch, with the shapes of a catalogue architecture: prefill, decode, training step.

Decode runs a stack of layers that is larger than any cache, because a model's next layer never lies in the cache
either, and on CUDA as a captured graph, as rollout engines run it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from hetrl.describe.measured import Measurement, Question, Use
from hetrl.measure.profile_fit import layer_work
from hetrl.runtime.instruments.kernels import DTYPES
from hetrl.runtime.instruments.timing import Repetitions
from hetrl.workload import Architecture

STACK_BYTES = 2**28  # more than the last-level cache of any GPU and of most processors
_MOST_LAYERS = 64  # of a stack: a toy model never fills a cache
ROPE_BASE = 10_000.0  # Su et al. (arXiv 2104.09864); its value changes no time


@dataclass(frozen=True)
class Point:
    """One size of a layer: `tokens` are the context of a decode step, else the length of each sequence."""

    kind: str
    batch: int
    tokens: int
    use: Use = "fit"


def _points(kind: str, fit: list[tuple[int, int]], held_out: list[tuple[int, int]]) -> tuple[Point, ...]:
    return (*(Point(kind, *size) for size in fit), *(Point(kind, *size, use="held out") for size in held_out))


POINTS = {
    "cpu": (
        *_points("prefill layer", [(1, 32), (1, 128), (1, 512)], [(1, 64), (1, 256)]),
        *_points("decode layer", [(1, 128), (4, 256), (16, 512)], [(2, 512), (8, 256)]),
        *_points("training layer", [(1, 64), (1, 256), (2, 256)], [(1, 128), (2, 128)]),
    ),
    "cuda": (
        *_points("prefill layer", [(1, 128), (1, 512), (1, 2048), (4, 2048)], [(1, 1024), (2, 2048)]),
        *_points("decode layer", [(1, 512), (8, 1024), (64, 1024), (256, 512)], [(4, 2048), (32, 1024), (128, 512)]),
        *_points("training layer", [(1, 512), (1, 2048), (4, 2048)], [(1, 1024), (2, 2048)]),
    ),
}


class Layer(nn.Module):
    """Pre-norm attention with grouped keys and rotary positions, then a SwiGLU (or GELU) feed-forward."""

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, model: Architecture, context: int) -> None:
        super().__init__()
        self.model = model
        width, bias = model.head_dim, model.linear_bias
        qkv_bias = model.qkv_bias or bias
        self.norms = nn.ModuleList(nn.RMSNorm(model.hidden) for _ in range(2))
        self.head_norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2 if model.qk_norm else 0))
        self.q = nn.Linear(model.hidden, model.heads * width, bias=qkv_bias)
        self.k, self.v = (nn.Linear(model.hidden, model.kv_heads * width, bias=qkv_bias) for _ in range(2))
        self.o = nn.Linear(model.heads * width, model.hidden, bias=bias)
        self.up = nn.Linear(model.hidden, model.intermediate, bias=bias)
        self.gate = nn.Linear(model.hidden, model.intermediate, bias=bias) if model.gated_mlp else None
        self.down = nn.Linear(model.intermediate, model.hidden, bias=bias)
        angles = torch.outer(torch.arange(context + 1), ROPE_BASE ** (-torch.arange(0, width, 2) / width))
        self.register_buffer("cos", torch.cat([angles, angles], dim=-1).cos())
        self.register_buffer("sin", torch.cat([angles, angles], dim=-1).sin())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the layer's output for whole sequences [batch, sequence, hidden], causal."""
        q, k, v = self._heads(x, 0)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self._finish(x, attended.transpose(1, 2).flatten(2))

    def decode(self, x: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Return the output for one token of each sequence [batch, 1, hidden]; its key and value end the caches.

        Caches are [batch, kv_heads, context, head_dim]. The queries that share a key head stand as rows of one product,
        so that no key is copied.
        """
        batch, context = x.shape[0], keys.shape[2]
        q, k, v = self._heads(x, context - 1)
        keys[:, :, -1:], values[:, :, -1:] = k, v
        grouped = q.view(batch, self.model.kv_heads, -1, self.model.head_dim)
        attended = functional.scaled_dot_product_attention(grouped, keys, values)
        return self._finish(x, attended.reshape(batch, 1, -1))

    def _heads(self, x: torch.Tensor, position: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        normed = self.norms[0](x)
        shape = (*x.shape[:2], -1, self.model.head_dim)
        q, k, v = (linear(normed).view(shape).transpose(1, 2) for linear in (self.q, self.k, self.v))
        if self.head_norms:
            q, k = self.head_norms[0](q), self.head_norms[1](k)
        return self._rotate(q, position), self._rotate(k, position), v

    def _rotate(self, heads: torch.Tensor, position: int) -> torch.Tensor:
        places = slice(position, position + heads.shape[2])
        first, second = heads.chunk(2, dim=-1)
        return heads * self.cos[places] + torch.cat([-second, first], dim=-1) * self.sin[places]

    def _finish(self, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        x = x + self.o(attended)
        normed = self.norms[1](x)
        grown = self.up(normed)
        inner = functional.gelu(grown) if self.gate is None else functional.silu(self.gate(normed)) * grown
        result: torch.Tensor = x + self.down(inner)
        return result


def layers(model: Architecture, device: torch.device, how: Repetitions) -> Iterator[Measurement]:
    """Yield the layer's times at every size; bf16 on CUDA, fp32 on a CPU, as the engines of hetrl run there."""
    dtype = "bf16" if device.type == "cuda" else "fp32"
    for point in POINTS[device.type]:
        run, count = _PREPARE[point.kind](model, device, DTYPES[dtype], point)
        seconds = tuple(one / count for one in how.times(run, device))
        length = "context" if point.kind == "decode layer" else "sequence"
        question: Question = {"architecture": model.name, "dtype": dtype, "batch": point.batch, length: point.tokens}
        unit, work = layer_work(point.kind, model.name, dtype, point.batch, point.tokens)
        yield Measurement(point.kind, question, unit, work, how.warm_up, seconds, point.use)


Run = tuple[Callable[[], object], int]  # what to time, and how many layers it runs


def _prefill(model: Architecture, device: torch.device, dtype: torch.dtype, point: Point) -> Run:
    layer = Layer(model, point.tokens).to(device, dtype).requires_grad_(False)
    x = torch.randn(point.batch, point.tokens, model.hidden, device=device).to(dtype)
    return lambda: layer(x), 1


def _train(model: Architecture, device: torch.device, dtype: torch.dtype, point: Point) -> Run:
    layer = Layer(model, point.tokens).to(device, dtype)
    x = torch.randn(point.batch, point.tokens, model.hidden, device=device).to(dtype).requires_grad_()
    gradient = torch.ones_like(x)

    def run() -> None:
        layer.zero_grad(set_to_none=True)
        x.grad = None
        layer(x).backward(gradient)

    return run, 1


def _decode(model: Architecture, device: torch.device, dtype: torch.dtype, point: Point) -> Run:
    layer_bytes = model.layer_parameters * (torch.finfo(dtype).bits // 8)
    count = min(math.ceil(STACK_BYTES / layer_bytes), _MOST_LAYERS)
    stack = [Layer(model, point.tokens).to(device, dtype).requires_grad_(False) for _ in range(count)]
    shape = (point.batch, model.kv_heads, point.tokens, model.head_dim)
    caches = [[torch.randn(shape, device=device).to(dtype) for _ in range(2)] for _ in stack]
    start = torch.randn(point.batch, 1, model.hidden, device=device).to(dtype)

    def run() -> None:
        x = start
        for layer, (keys, values) in zip(stack, caches, strict=True):
            x = layer.decode(x, keys, values)

    return (_captured(run) if device.type == "cuda" else run), count


def _captured(run: Callable[[], None]) -> Callable[[], None]:
    """Return a replay of the run as a CUDA graph (https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs)."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


_PREPARE: dict[str, Callable[[Architecture, torch.device, torch.dtype, Point], Run]] = {
    "prefill layer": _prefill,
    "decode layer": _decode,
    "training layer": _train,
}
