"""The training engine: score token sequences and step a model with megatron-core, on the ranks of one layout.

    start_world(...)
    engine = MegatronEngine(config, layout, rank=rank, optimizer=settings, seed=0)
    engine.load_files(directory)                  # or engine.load(random_weights(config, seed))
    engine.score(batch); engine.train_step(batch, LossSettings())
    for name, tensor in engine.export(): ...      # every rank drives it, rank 0 gets the tensors
    engine.save(directory, {"step": 1}); engine.finish_save(); engine.restore(directory)
    engine.close(); stop_world()

All methods are collective: every rank of the world calls them in the same order with the same arguments.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import torch
from numpy.typing import NDArray

from hetrl.errors import HetrlError
from hetrl.runtime.megatron.cpu import uncompiled

with uncompiled():  # first: whatever else imports megatron-core finds it
    from megatron.core import parallel_state

from hetrl.runtime.megatron import (
    checkpoint as megatron_checkpoint,
    hf_weights,
    model as megatron_model,
    restore as megatron_restore,
)
from hetrl.runtime.megatron.batch import MicroBatch, TokenBatch
from hetrl.runtime.megatron.groups import join_groups, leave_groups, require_world
from hetrl.runtime.megatron.layout import Layout
from hetrl.runtime.megatron.offload import Offload, release
from hetrl.runtime.megatron.optimizer import (
    OptimizerSettings,
    build_optimizer,
    detach_hooks,
    gather_changes,
    gather_parameters,
    take_step,
)
from hetrl.runtime.megatron.outputs import check_loss, check_scores, output_of
from hetrl.runtime.megatron.passes import LossFunction, Parts, drive, mean_metrics, parts_of, scores_on_rank_0
from hetrl.runtime.megatron.shards import Shards
from hetrl.runtime.rl import losses
from hetrl.runtime.wan.torch_world import start_world, stop_world
from hetrl.runtime.wire import LossSettings

__all__ = ["MegatronEngine", "OptimizerSettings", "start_world", "stop_world"]


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
        recompute_layers: int | None = None,
        timeout_seconds: float = 600.0,
        tokenizer: Path | None = None,
    ) -> None:
        """Build this rank's part of the model of a Hugging Face `config` inside the running torch.distributed world.

        `dtype` is float32 or bfloat16 (then with float32 main parameters), `recompute` what is computed
        again in the backward pass: none, selective (norms and the feed-forward's activation) or full (the first
        `recompute_layers` layers of this stage whole, all unless it is given). `optimizer` is None for an engine that
        only scores. `timeout_seconds` bounds each collective. Checkpoints take the tokenizer of the
        directory `tokenizer` along. Raises HetrlError when the world, the layout and the model do not fit each other.
        Weights come with `load`.
        """
        self.architecture, self.config = hf_weights.architecture_of(config), dict(config)
        megatron_model.check_layout(self.architecture, layout)
        require_world(layout, rank)
        self.layout, self.rank, self.settings, self.tokenizer = layout, rank, optimizer, tokenizer
        self.place = layout.coordinates(rank)
        self.dtype = megatron_model.dtype_of(dtype)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        join_groups(layout, seed, timeout_seconds)
        model = self._stage_model(recompute, recompute_layers)
        self.parameters = megatron_model.global_parameters(model, layout, self.place.stage)
        homes, group = hf_weights.homes(self.architecture), parallel_state.get_tensor_model_parallel_group()
        self.shards = Shards(self.architecture, layout, self.place, homes, self.parameters, group, self.device)
        self.model: Any = model
        self._output: Any = output_of(self.architecture, megatron_model.head_weight(model), group)
        self.optimizer: Any = None
        self.steps = 0  # what the optimiser has taken
        if optimizer is not None:
            self.model, self.optimizer = build_optimizer(model, optimizer, self.dtype)
        self._offload = Offload()
        self._loaded = False
        self._saving: megatron_checkpoint.Saving | None = None  # a checkpoint that is being written

    def _stage_model(self, recompute: str, recompute_layers: int | None) -> Any:
        first, end = self.layout.stages[self.place.stage]
        return megatron_model.build_model(
            self.config,
            self.architecture,
            self.layout,
            self.dtype,
            recompute=recompute,
            recompute_layers=end - first if recompute_layers is None else recompute_layers,
        )

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Take the weights of a Hugging Face model, tensor by tensor.

        Every rank iterates over the same full tensors, in any order and dtype, and keeps its shard. The optimiser's
        main parameters follow; its moments stay. What only scores may sleep: its state on the host changes. Raises
        HetrlError for missing, surplus or misshapen tensors, naming them; what a tied model or an old checkpoint stores
        twice (lm_head, rotary frequencies) is passed over.
        """
        if self.optimizer is not None:
            self._require_awake()
        self._loaded = False
        self.shards.take(tensors, self._offload.at_hand)
        self._take_weights()

    def load_files(self, source: Path, *, head_seed: int | None = None) -> None:
        """Take the weights of a Hugging Face directory or safetensors file, as `load` does.

        Every rank reads its part of each tensor. With `head_seed` a scalar head that the files do not have, being a
        language model's, is drawn. Raises what `load` does, on every rank, also when one cannot read.
        """
        self._loaded = False
        head = None if head_seed is None else hf_weights.random_head(self.architecture, head_seed)
        megatron_restore.load_files(self.shards, source, head)
        self._take_weights()

    def _take_weights(self) -> None:
        """Let the optimiser know of weights that it has not made."""
        if self.optimizer is not None:
            self.optimizer.reload_model_params()
        gather_changes(self.model)
        self._loaded = True

    def sleep(self, *, offload: bool) -> None:
        """Leave the device to others until `wake`: with `offload` all state moves to the host's memory.

        Gradients are dropped then. In between the engine can do nothing else.
        """
        self._require_weights()
        if offload:
            gather_parameters(self.model)
            self._offload.leave(self.model, self.optimizer)
        release()

    def wake(self) -> None:
        """Take back to the device what is on the host."""
        if self._offload.away:
            self._offload.come_back()

    @property
    def host_bytes(self) -> int:
        """Return what the host's memory holds while the engine sleeps."""
        return self._offload.host_bytes

    @torch.no_grad()
    def score(
        self, batch: TokenBatch, temperature: float = 1.0, what: str = "logprobs"
    ) -> NDArray[numpy.float32] | None:
        """Return what a model says of each token, float32 [n, s], on rank 0; None elsewhere.

        `what` is logprobs, log p(token j | tokens before j); of a model with a scalar head values, of the text before
        token j, or rewards, of the text up to it. Padding is 0, and but for rewards column 0. The tokens are spread
        over the replicas in proportion to `layout.samples`. Raises HetrlError where the head does not give it.
        """
        self._require_weights()
        check_scores(self.architecture, what)
        parts = parts_of(batch, self.layout)
        scored = partial(self._output.scores, what=what, temperature=temperature)
        outputs = self._drive(batch, parts, scored, training=False)
        scores = scores_on_rank_0(outputs, batch, parts, self.layout, self.place.replica, self.device)
        return scores if self.rank == 0 else None

    def _drive(self, batch: TokenBatch, parts: list[Parts], function: LossFunction, *, training: bool) -> list[Any]:
        ours = parts[self.place.replica]
        return drive(self.model, batch, ours, self.layout, self.device, function, forward_only=not training)

    def train_step(self, batch: TokenBatch, settings: LossSettings) -> dict[str, float]:
        """Take one optimiser step on the mean of a loss over all masked tokens; return its metrics on every rank.

        The losses and the extras they need are those of `hetrl.runtime.rl.losses`; the `learning_rate` of `settings` is
        for this step. Returns loss, grad_norm (before clipping), tokens,
        learning_rate and the means of the loss's metrics. Raises HetrlError for a wrong request, and, with the weights
        untouched, when the loss or the gradient is not finite.
        """
        optimizer, own = self._require_optimizer()
        losses.check(settings, batch.extras)
        check_loss(self.architecture, settings)
        if not batch.mask.any():
            raise HetrlError("train_step: no token of the batch is a target; its mask is empty")
        self.model.zero_grad_buffer()
        optimizer.zero_grad()
        function = partial(self._loss_of, settings=settings)
        outputs = self._drive(batch, parts_of(batch, self.layout), function, training=True)
        reports = self.place.tensor_index == 0 and self.place.stage == self.layout.pipeline - 1
        metrics = mean_metrics(outputs if reports else [], int(batch.mask.sum()), self.device)
        rate = own.learning_rate if settings.learning_rate is None else settings.learning_rate
        grad_norm = take_step(optimizer, rate, metrics["loss"])
        self.steps += 1
        return {**metrics, "grad_norm": grad_norm, "learning_rate": rate}

    def _loss_of(
        self, micro: MicroBatch, states: torch.Tensor, settings: LossSettings
    ) -> tuple[torch.Tensor, torch.Tensor, losses.Sums]:
        """Return what megatron's schedule expects: the sum to differentiate, its number of tokens, what to report."""
        total, sums = self._output.loss(micro, states, settings)
        return total, micro.mask.sum().int(), {"loss": total.detach().clone(), **sums}

    def export(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the weights under their Hugging Face names, in the order of the layers, on rank 0.

        Contiguous CPU tensors in the model's dtype, one at a time. Collective: the other ranks iterate too and get
        nothing. Only the first replica takes part.
        """
        self._require_weights()
        gather_parameters(self.model)
        yield from self.shards.stream(lambda name: self.parameters[name].data, self.dtype)

    def save(self, directory: Path, extra: Mapping[str, Any], beside: Mapping[str, bytes] | None = None) -> None:
        """Copy weights, optimiser, generators and `extra` (JSON: step, position in the data, ...) to a checkpoint.

        `beside` are files that lie with it.

        Returns once the state is in host memory; it is written beside the next steps, and `finish_save` completes it.
        A checkpoint that is being written is completed first. See `checkpoints.files`: `directory`, on the disk of rank
        0, is whole or not there. Raises HetrlError on every rank when either cannot be written.
        """
        optimizer, _ = self._require_optimizer()
        self.finish_save()
        gather_parameters(self.model)
        model = megatron_checkpoint.Model(self.config, self.tokenizer, beside or {})
        self._saving = megatron_checkpoint.begin(self.shards, optimizer, directory, model, self.steps, extra)

    def finish_save(self, *, wait: bool = True) -> bool:
        """Complete the checkpoint that is being written; return whether it, if any, is whole.

        Without `wait`, return False while a rank still writes. Raises HetrlError on every rank, naming the file and the
        cause, when a rank could not write; then there is no checkpoint of that name.
        """
        saving, self._saving = self._saving, None
        if saving is None or saving.finish(wait=wait):
            return True
        self._saving = saving
        return False

    def restore(self, directory: Path) -> dict[str, Any]:
        """Take up the state that `save` wrote, on whatever layout, and return its `extra`.

        Every rank reads its part of the files, so they lie where all ranks see them. The random generators follow only
        onto the same layout. Raises HetrlError on every rank, naming the checkpoint, when it is half-written or not of
        this model; the engine then has no weights.
        """
        self._loaded = False
        state = megatron_restore.restore(self.shards, self.optimizer, directory)
        gather_changes(self.model)
        self.steps, self._loaded = int(state["steps"]), True
        extra: dict[str, Any] = state["extra"]
        return extra

    def close(self) -> None:
        """Complete a checkpoint; drop model, optimiser and megatron's groups, not the world (see `stop_world`)."""
        self.finish_save()
        self._loaded = False
        self.parameters.clear()
        detach_hooks(self.model)
        self.model = self.optimizer = self._output = None
        leave_groups()

    def _require_awake(self) -> None:
        if self._offload.away:
            raise HetrlError(f"rank {self.rank}: the model is asleep, its weights are on the host; wake it first")

    def _require_weights(self) -> None:
        self._require_awake()
        if not self._loaded:
            raise HetrlError(f"rank {self.rank}: the model has no weights; call load first")

    def _require_optimizer(self) -> tuple[Any, OptimizerSettings]:
        self._require_weights()
        if self.settings is None:
            raise HetrlError(f"rank {self.rank}: this engine only scores; give it OptimizerSettings to train")
        return self.optimizer, self.settings
