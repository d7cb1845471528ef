"""What runs inside vLLM's workers: weights from a file on this node. The only module that imports vllm.

vLLM imports it in every worker (`--worker-extension-cls`) before the worker chooses its
weight-transfer engine; the import registers the engine `hetrl_file`. See
https://docs.vllm.ai/en/latest/training/weight_transfer/ and https://docs.vllm.ai/en/latest/training/layerwise/.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from hetrl.runtime.vllm.command import BACKEND
from hetrl.runtime.vllm.loading import tensors_of
from hetrl.runtime.weights.safetensors_file import places_of


class WorkerExtension:
    """Mixed into vLLM's worker."""

    def release_cached_memory(self) -> None:
        """Give what torch has kept for later use to the other processes on the device."""
        torch.accelerator.empty_cache()


@dataclass
class FileInit(WeightTransferInitInfo):
    """The engine needs nothing to start."""


@dataclass
class FileUpdate(WeightTransferUpdateInfo):
    """A weight file (`safetensors_file`) on this node, whose digest was proven while generation went on."""

    path: str


class FileEngine(WeightTransferEngine[FileInit, FileUpdate]):
    """Loads a whole version from one file in one step; where that fails the model may be of two versions."""

    init_info_cls = FileInit
    update_info_cls = FileUpdate

    def init_transfer_engine(self, init_info: FileInit) -> None:
        """Do nothing: there is no connection."""

    def start_weight_update(self) -> None:
        """Do nothing: `receive_weights` begins and ends with a model that can serve."""

    def finish_weight_update(self) -> None:
        """Do nothing: `receive_weights` leaves a model that can serve."""

    def shutdown(self) -> None:
        """Do nothing: there is no connection."""

    def receive_weights(self, update_info: FileUpdate) -> None:
        """Load the file; raises ValueError where it lacks weights of the model."""
        path = Path(update_info.path)
        initialize_layerwise_reload(self.model)
        try:
            loaded = self.model.load_weights(tensors_of(path, places_of(path), self.device))
        finally:
            finalize_layerwise_reload(self.model, self.model_config)
        if current_platform.is_cpu():
            _repack_output_layer(self.model)
        if loaded is not None and (missing := {name for name, _ in self.model.named_parameters()} - loaded):
            raise ValueError(f"{path} lacks the weights of {sorted(missing)[0]}")


def _repack_output_layer(model: torch.nn.Module) -> None:
    """Repack lm_head for oneDNN: with tied embeddings no lm_head.weight arrives and the old packed copy would stay."""
    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)


def _repack_experts_on_reload() -> None:
    """Let the CPU experts repack after every load: vLLM 0.32.0 does so only when their kernel is first set up."""
    original = UnquantizedFusedMoEMethod._setup_kernel

    def setup(self: Any, layer: torch.nn.Module, w13: torch.Tensor, w2: torch.Tensor) -> None:
        reloaded = self.moe_kernel is not None
        original(self, layer, w13, w2)
        if reloaded:
            self.moe_kernel.fused_experts.process_weights_after_loading(layer)

    UnquantizedFusedMoEMethod._setup_kernel = setup


def _make_inputs_of_later_stages() -> None:
    """Let later pipeline stages on a CPU make what the stage before writes into; vLLM 0.32.0 does so when it warms up.

    On a CPU it does not warm up.
    """
    original = GPUModelRunner.sync_and_gather_intermediate_tensors

    def gather(self: Any, *arguments: Any, **named: Any) -> Any:
        if self.intermediate_tensors is None:
            self.intermediate_tensors = self.model.make_empty_intermediate_tensors(
                batch_size=self.max_num_tokens, dtype=self.model_config.dtype, device=self.device
            )
        return original(self, *arguments, **named)

    GPUModelRunner.sync_and_gather_intermediate_tensors = gather


WeightTransferEngineFactory.register_engine(BACKEND, FileEngine)
if current_platform.is_cpu():
    _repack_experts_on_reload()
    _make_inputs_of_later_stages()
