"""The training engine: score token sequences and step a model with megatron-core, on the ranks of one layout.

    start_world(...)
    engine = MegatronEngine(config, layout, rank=rank, optimizer=settings, seed=0)
    engine.load(iter_safetensors(directory))      # or random_weights(config, seed)
    engine.score(batch); engine.train_step(batch, "policy", hyper)
    for name, tensor in engine.export(): ...      # every rank drives it, rank 0 gets the tensors
    engine.close(); stop_world()

All methods are collective: every rank of the world calls them in the same order with the same arguments.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from numpy.typing import NDArray

from hetrl.errors import HetrlError
from hetrl.runtime import hf_weights, losses, megatron_cpu, megatron_model
from hetrl.runtime.batch import TokenBatch
from hetrl.runtime.layout import Layout
from hetrl.runtime.logprob import token_logprobs
from hetrl.runtime.micro_batches import MicroBatch, cut
from hetrl.runtime.optimizer import OptimizerSettings
from hetrl.runtime.torch_world import start_world, stop_world

__all__ = ["MegatronEngine", "OptimizerSettings", "start_world", "stop_world"]

LossFunction = Callable[[MicroBatch, torch.Tensor], Any]


class MegatronEngine:
    """One rank of a model in training; a process holds one engine at a time, since megatron's groups are global."""

    def __init__(
        self,
        config: Mapping[str, Any],
        layout: Layout,
        *,
        rank: int,
        dtype: str = "float32",
        optimizer: OptimizerSettings | None,
        seed: int,
        recompute: str = "none",
        timeout_seconds: float = 600.0,
    ) -> None:
        """Build this rank's part of the model of a Hugging Face `config` inside the running torch.distributed world.

        `dtype` is float32 or bfloat16 (then with float32 main parameters), `recompute` none or full, `optimizer` None
        for an engine that only scores. `timeout_seconds` bounds each collective. Raises HetrlError when the world, the
        layout and the model do not fit each other. Weights come with `load`.
        """
        self.architecture = hf_weights.architecture_of(config)
        megatron_model.check_layout(self.architecture, layout)
        if not dist.is_initialized() or (dist.get_world_size(), dist.get_rank()) != (layout.world_size, rank):
            raise HetrlError(f"rank {rank}: the layout needs a running world of {layout.world_size}; see start_world")
        if dtype not in megatron_model.DTYPES:
            raise HetrlError(f'dtype "{dtype}" is not known; known: {", ".join(megatron_model.DTYPES)}')
        megatron_cpu.install()
        self.layout, self.rank, self.settings = layout, rank, optimizer
        self.place = layout.coordinates(rank)
        self.dtype = megatron_model.DTYPES[dtype]
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        parallel_state.initialize_model_parallel(
            layout.tensor,
            layout.pipeline,
            distributed_timeout_minutes=timeout_seconds / 60.0,
            create_gloo_process_groups=False,
        )
        model_parallel_cuda_manual_seed(seed)
        self.tensor_group = parallel_state.get_tensor_model_parallel_group()
        self.model: Any = megatron_model.build_model(config, self.architecture, layout, self.dtype, recompute)
        self.parameters = megatron_model.global_parameters(self.model, layout, self.place.stage)
        self.places = hf_weights.places(self.architecture)
        self.optimizer: Any = None
        if optimizer is not None:
            self.model, self.optimizer = megatron_model.build_optimizer(self.model, optimizer, self.dtype)
        self._loaded = False

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Take the weights of a Hugging Face model, tensor by tensor.

        Every rank iterates over the same full tensors, in any order and dtype, and keeps its shard. The optimiser's
        main parameters follow; its moments stay. Raises HetrlError for missing, surplus or misshapen tensors, naming
        them; what a tied model or an old checkpoint stores twice (lm_head, rotary frequencies) is passed over.
        """
        self._loaded = False
        arrived: set[str] = set()
        for name, full in tensors:
            if name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and self.architecture.tied_embeddings):
                continue
            arrived.add(name)
            if name in self.places:
                self._take(name, full)
        hf_weights.missing_and_surplus(arrived, self.places)
        if self.optimizer is not None:
            self.optimizer.reload_model_params()
        self._loaded = True

    @torch.no_grad()
    def _take(self, name: str, full: torch.Tensor) -> None:
        """Copy this rank's shard of one tensor."""
        place = self.places[name]
        if tuple(full.shape) != place.shape:
            raise HetrlError(f"weights: {name} has shape {tuple(full.shape)}, config.json says {place.shape}")
        part = hf_weights.shard(full, place, self.place.tensor_index, self.layout.tensor)
        for parameter in (place.parameter, place.twin):
            if parameter in self.parameters:
                hf_weights.write(self.parameters[parameter].data, part, place, self.architecture)

    @torch.no_grad()
    def score(self, batch: TokenBatch, temperature: float = 1.0) -> NDArray[numpy.float32] | None:
        """Return log p(token j | tokens before j) of each token, float32 [n, s], on rank 0; None elsewhere.

        Column 0 and padding are 0. The samples are spread over the replicas in proportion to `layout.samples`.
        """
        self._require_weights()
        trimmed, shares = batch.trimmed(), self.layout.shares(batch.samples)
        width = trimmed.tokens.shape[1]
        part: torch.Tensor | None = None
        if width > 1:
            function = partial(self._logprobs_of, temperature=temperature)
            outputs = self._run(trimmed, function, forward_only=True)
            part = torch.cat(outputs)[: len(shares[self.place.replica])] if outputs else None
        result = self._collect(part, shares, width) if width > 1 else torch.zeros(batch.samples, width)
        if self.rank != 0:
            return None
        scores = numpy.zeros(batch.tokens.shape, dtype=numpy.float32)
        scores[:, :width] = result.numpy()
        scores[~batch.real] = 0.0
        return scores

    def _logprobs_of(self, micro: MicroBatch, logits: torch.Tensor, temperature: float) -> torch.Tensor:
        return self._logprobs(micro, logits, temperature)[0]

    def _logprobs(
        self, micro: MicroBatch, logits: torch.Tensor, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return log-probs and entropies [b, s] of a micro-batch's tokens; column 0, which nothing predicts, is 0."""
        pair = token_logprobs(
            logits[:, :-1],
            micro.tokens[:, 1:],
            vocabulary=self.architecture.vocabulary,
            group=self.tensor_group,
            temperature=temperature,
        )
        logprobs, entropy = (torch.nn.functional.pad(values, (1, 0)) for values in pair)
        return logprobs, entropy

    def _collect(self, part: torch.Tensor | None, shares: tuple[range, ...], width: int) -> torch.Tensor:
        """Bring the rows of all replicas from their last stages to rank 0, in order; empty elsewhere."""
        rows = []
        for replica, share in enumerate(shares):
            source = self.layout.rank_of(replica, self.layout.pipeline - 1, 0)
            received = self._to_rank_0(source, part, (len(share), width), torch.float32)
            if received is not None:
                rows.append(received)
        return torch.cat(rows) if rows else torch.empty(0, width)

    def _to_rank_0(
        self, source: int, tensor: torch.Tensor | None, shape: tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor | None:
        """Move a tensor of `source` to the host memory of rank 0, which gets it; None elsewhere."""
        if self.rank == source and tensor is not None and source != 0:
            dist.send(tensor.contiguous(), 0)
        if self.rank != 0:
            return None
        if source != 0:
            tensor = torch.empty(shape, dtype=dtype, device=self.device)
            dist.recv(tensor, source)
        assert tensor is not None
        return tensor.cpu()

    def train_step(self, batch: TokenBatch, loss: str, hyper: Mapping[str, float | str]) -> dict[str, float]:
        """Take one optimiser step on the mean of a loss over all masked tokens; return its metrics on every rank.

        `loss` and the extras it needs are those of `hetrl.runtime.losses`; `hyper` may hold its coefficients,
        `temperature` and `learning_rate` (for this step). Returns loss, grad_norm (before clipping), tokens,
        learning_rate and the means of the loss's metrics. Raises HetrlError for a wrong request, and, with the weights
        untouched, when the loss or the gradient is not finite.
        """
        optimizer = self._require_optimizer()
        losses.check(loss, batch.extras, hyper)
        if not batch.mask.any():
            raise HetrlError("train_step: no token of the batch is a target; its mask is empty")
        self.model.zero_grad_buffer()
        optimizer.zero_grad()
        function = partial(self._loss_of, loss=loss, hyper=hyper)
        metrics = self._mean(self._run(batch.trimmed(), function, forward_only=False), int(batch.mask.sum()))
        optimizer.prepare_grads()
        grad_norm = float(optimizer.get_grad_norm())
        if not math.isfinite(grad_norm) or not math.isfinite(metrics["loss"]):
            raise HetrlError(
                f"train_step: loss {metrics['loss']}, gradient norm {grad_norm}: not finite, the step was not taken; "
                "look at the batch's advantages and log-probs, or lower the learning rate"
            )
        rate = self._set_learning_rate(hyper)
        optimizer.step()
        return {**metrics, "grad_norm": grad_norm, "learning_rate": rate}

    def _loss_of(
        self, micro: MicroBatch, logits: torch.Tensor, loss: str, hyper: Mapping[str, float | str]
    ) -> tuple[torch.Tensor, torch.Tensor, losses.Sums]:
        """Return what megatron's schedule expects: the sum to differentiate, its number of tokens, what to report."""
        logprobs, entropy = self._logprobs(micro, logits, float(hyper.get("temperature", 1.0)))
        total, sums = losses.evaluate(loss, logprobs, micro.mask, micro.extras, hyper, entropy)
        return total, micro.mask.sum().int(), {"loss": total.detach().clone(), **sums}

    def _mean(self, outputs: list[losses.Sums], tokens: int) -> dict[str, float]:
        """Return the metrics over the whole batch, on every rank: sums over micro-batches and replicas / tokens."""
        reports = self.place.tensor_index == 0 and self.place.stage == self.layout.pipeline - 1
        sums = torch.zeros(len(losses.METRICS), 2, dtype=torch.float64)  # value, how many gave one
        for output in outputs if reports else []:
            for name, value in output.items():
                sums[losses.METRICS.index(name)] += torch.tensor([float(value), 1.0], dtype=torch.float64)
        sums = sums.to(self.device)
        dist.all_reduce(sums)
        values = zip(losses.METRICS, sums.tolist(), strict=True)
        return {"tokens": float(tokens), **{name: value / tokens for name, (value, given) in values if given}}

    def _set_learning_rate(self, hyper: Mapping[str, float | str]) -> float:
        assert self.settings is not None
        rate = float(hyper.get("learning_rate", self.settings.learning_rate))
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        return rate

    def _run(self, batch: TokenBatch, function: LossFunction, *, forward_only: bool) -> list[Any]:
        """Drive this replica's micro-batches through the pipeline; the last stage gets what `function` reports."""
        share = self.layout.shares(batch.samples)[self.place.replica]
        micros = cut(batch, share, self.layout.micro_batch, self.device)

        def forward_step(iterator: Iterator[MicroBatch], model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
            micro = next(iterator)
            return model(micro.tokens, None, None), partial(_report, function, micro)

        outputs: list[Any] = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(micros),
            model=[self.model],
            num_microbatches=len(micros),
            seq_length=batch.tokens.shape[1],
            micro_batch_size=micros[0].tokens.shape[0],
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )
        return outputs

    @torch.no_grad()
    def export(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the weights under their Hugging Face names, in the order of the layers, on rank 0.

        Contiguous CPU tensors in the model's dtype, one at a time. Collective: the other ranks iterate too and get
        nothing. Only the first replica takes part.
        """
        self._require_weights()
        for name, place in self.places.items():
            stage = hf_weights.stage_of(place, self.layout)
            full = self._merged(place) if (self.place.replica, self.place.stage) == (0, stage) else None
            received = self._to_rank_0(self.layout.rank_of(0, stage, 0), full, place.shape, self.dtype)
            if received is not None:
                yield name, received

    def _merged(self, place: hf_weights.Place) -> torch.Tensor | None:
        """Gather one tensor of this stage at its first tensor rank, as a copy; None at the others."""
        part = hf_weights.read(self.parameters[place.parameter].data, place, self.architecture)
        if self.layout.tensor == 1 or place.split is None:
            return hf_weights.merge([part], place).clone() if self.place.tensor_index == 0 else None
        first = self.place.tensor_index == 0
        parts = [torch.empty_like(part) for _ in range(self.layout.tensor)] if first else None
        dist.gather(part, parts, group=self.tensor_group, group_dst=0)
        return hf_weights.merge(parts, place) if parts is not None else None

    def close(self) -> None:
        """Drop the model, the optimiser and megatron's groups; the torch.distributed world stays (see `stop_world`)."""
        self._loaded = False
        self.parameters.clear()
        self.model = self.optimizer = None
        parallel_state.destroy_model_parallel()

    def _require_weights(self) -> None:
        if not self._loaded:
            raise HetrlError(f"rank {self.rank}: the model has no weights; call load first")

    def _require_optimizer(self) -> Any:
        self._require_weights()
        if self.optimizer is None:
            raise HetrlError(f"rank {self.rank}: this engine only scores; give it OptimizerSettings to train")
        return self.optimizer


def _report(function: LossFunction, micro: MicroBatch, logits: torch.Tensor, non_loss_data: bool = False) -> Any:
    """Call `function` as megatron's schedule calls its loss function, with a flag that says what it already knows."""
    return function(micro, logits)
