"""Megatron-core's optimiser: its settings, and its state, read and written parameter by parameter."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer

from hetrl.errors import HetrlError
from hetrl.runtime.wan.group import WanProcessGroup


@dataclass(frozen=True)
class OptimizerSettings:
    """AdamW (arXiv 1711.05101) with gradient clipping by the global norm (`clip_grad` 0: no clipping).

    Norms and biases do not decay. `beta2` 0.95 is what large language models are trained with (GPT-3, arXiv
    2005.14165, appendix B). `distributed` shards the optimiser's state over the replicas (ZeRO-1, arXiv 1910.02054).
    Gradients are kept and summed over the replicas in fp32 or, without `grad_reduce_in_fp32`, in the model's dtype, in
    buckets of about `bucket_parameters` (None: megatron's 40 million, or a million per replica).
    """

    learning_rate: float
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    clip_grad: float = 1.0
    distributed: bool = True
    grad_reduce_in_fp32: bool = True
    bucket_parameters: int | None = None


MOMENTS = ("exp_avg", "exp_avg_sq")
WEIGHTS = "weights"  # of a checkpoint: float32, beside the moments


def build_optimizer(
    model: GPTModel, settings: OptimizerSettings, dtype: torch.dtype
) -> tuple[DistributedDataParallel, MegatronOptimizer]:
    """Wrap the model for gradients that are summed over the replicas, and return it with its optimiser.

    A bucket of gradients is summed as soon as the backward pass has made them, beside the rest of the pass. Where the
    optimiser is distributed, the next forward pass gathers what it has updated in the same way, and everything else
    that reads parameters asks for it with `gather_parameters`.
    """
    overlap = parallel_state.get_data_parallel_world_size() > 1
    gathers = overlap and settings.distributed
    wrapped = DistributedDataParallel(
        model.config,
        DistributedDataParallelConfig(
            grad_reduce_in_fp32=settings.grad_reduce_in_fp32,
            overlap_grad_reduce=overlap,
            overlap_param_gather=gathers,
            bucket_size=settings.bucket_parameters,
            use_distributed_optimizer=settings.distributed,
        ),
        model,
    )
    model.config.no_sync_func = wrapped.no_sync if overlap else None  # gradients are reduced in the last micro-batch
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=settings.learning_rate,
            weight_decay=settings.weight_decay,
            adam_beta1=settings.beta1,
            adam_beta2=settings.beta2,
            adam_eps=settings.eps,
            clip_grad=settings.clip_grad,
            bf16=dtype is torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=settings.distributed,
            overlap_param_gather=gathers,
        ),
        [wrapped],
        use_gloo_process_groups=False,
    )
    for group in optimizer.param_groups:  # megatron leaves this to its scheduler of learning rates
        group["weight_decay"] = settings.weight_decay * group["wd_mult"]
    if torch.cuda.is_available():
        for part in filter(lambda part: isinstance(part.optimizer, torch.optim.AdamW), optimizer.chained_optimizers):
            for group in part.optimizer.param_groups:  # torch's other ways hold 4 bytes more for every parameter
                group["fused"], group["foreach"] = True, False
    return wrapped, optimizer


def take_step(optimizer: Any, rate: float, loss: float) -> float:
    """Take a step at this learning rate with the gradients that are there; return their norm before clipping.

    Raises HetrlError, with the weights untouched, when the loss or the gradient is not finite.
    """
    optimizer.prepare_grads()  # ahead of the step, which would write what is not finite into the weights
    grad_norm = float(optimizer.get_grad_norm())
    if not math.isfinite(grad_norm) or not math.isfinite(loss):
        raise HetrlError(
            f"train_step: loss {loss}, gradient norm {grad_norm}: not finite, the step was not taken; "
            "look at the batch's advantages and log-probs, or lower the learning rate"
        )
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()
    optimizer.zero_grad()  # frees the float32 copies of bfloat16 gradients: others may need the device now
    return grad_norm


def gather_parameters(model: torch.nn.Module) -> None:
    """Take what the other replicas' optimisers have updated and no forward pass has asked for yet (collective)."""
    if isinstance(model, DistributedDataParallel) and model.ddp_config.overlap_param_gather:
        for bucket in model.bucket_groups:
            if not bucket.param_gather_dispatched:
                bucket.start_param_sync(force_sync=True)


def gather_changes(model: torch.nn.Module) -> None:
    """Gather over sites what the next steps change alone, beginning with all values once (collective).

    Megatron's parameter buffer holds, between two gathers, what the first one left: that is what changes refer to. So
    this is called whenever weights come from elsewhere than a step.
    """
    if isinstance(model, DistributedDataParallel) and model.ddp_config.use_distributed_optimizer:
        for buckets in model.bucket_groups:
            ranks = buckets.intra_distributed_optimizer_instance_group
            if isinstance(ranks, WanProcessGroup):  # others lie in one site
                for bucket in buckets.buckets:
                    ranks.gather_changes(bucket.param_data)


def detach_hooks(model: torch.nn.Module) -> None:
    """Let go of a model that is done: its hooks keep it alive, and with it megatron's groups and their threads."""
    if isinstance(model, DistributedDataParallel) and model.ddp_config.overlap_param_gather:
        model.disable_forward_pre_hook(param_sync=False)


@dataclass(frozen=True)
class Slice:
    """What this rank's optimiser holds of one parameter: elements `start`.. of it, flattened.

    `values` are flat float32 views of the main weights (`weights`) and the moments; writing them changes the optimiser.
    """

    start: int
    values: dict[str, torch.Tensor]

    @property
    def range(self) -> slice:
        """Return which elements of the flattened parameter these are."""
        return slice(self.start, self.start + self.values[WEIGHTS].numel())


def slice_of(optimizer: Any, parameter: torch.nn.Parameter) -> Slice | None:
    """Return this rank's slice of a parameter; None when other replicas hold all of it.

    Moments that no step has made yet are made here, zero as Adam makes them.
    """
    for part in optimizer.chained_optimizers:
        if isinstance(part, DistributedOptimizer):
            if parameter not in part.model_param_gbuf_map:
                continue
            start = part._get_model_param_range_map(parameter)["param"].start
            group, index = part.model_param_group_index_map[parameter]
            main = part.optimizer.param_groups[group]["params"][index]
        else:
            start, main = 0, getattr(parameter, "main_param", parameter)
        return Slice(start, _values(part.optimizer, main))
    return None


def _values(adam: torch.optim.Optimizer, main: torch.Tensor) -> dict[str, torch.Tensor]:
    state = adam.state[main]
    for name in MOMENTS:
        if name not in state:
            state[name] = torch.zeros_like(main, dtype=torch.float32)
    if isinstance(adam, torch.optim.AdamW):
        state.setdefault("step", _count(adam.param_groups[0], main, 0))
    return {name: tensor.detach().view(-1) for name, tensor in ((WEIGHTS, main), *((m, state[m]) for m in MOMENTS))}


def set_steps(optimizer: Any, steps: int) -> None:
    """Say how many steps Adam has taken, which its bias correction uses.

    torch counts per parameter, each in a tensor of its own; the fused Adam of Transformer Engine and Apex, which
    megatron takes where it is installed, per group.
    """
    for part in optimizer.chained_optimizers:
        for group in part.optimizer.param_groups:
            if not isinstance(part.optimizer, torch.optim.AdamW):
                group["step"] = steps
                continue
            for main in group["params"]:
                part.optimizer.state[main]["step"] = _count(group, main, steps)


def _count(group: dict[str, Any], main: torch.Tensor, steps: int) -> torch.Tensor:
    """Return torch's count of steps, where it wants it: its fused kernel reads it from the device."""
    return torch.tensor(float(steps), device=main.device if group["fused"] else None)
