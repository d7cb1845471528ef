"""vLLM's worker for the benchmark `pause`: ours, and with vLLM's own way of changing single weights in place."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from vllm.model_executor.model_loader.checkpoint_weight_patch import (
    CheckpointWeightPatch,
    load_checkpoint_weight_patches,
)

from hetrl.runtime.vllm.extension import WorkerExtension


class PatchingWorker(WorkerExtension):
    """Mixed into vLLM's worker."""

    def patch(self: Any, before: str, after: str) -> dict[str, float | str]:
        """Change the weights that differ between two files where they lie; finding which is not counted."""
        patches = [*_patches(load_file(Path(before)), load_file(Path(after)))]
        began = time.monotonic()
        try:
            load_checkpoint_weight_patches(self.model_runner.model, patches)
        except Exception as error:  # the benchmark says what vLLM said
            return {"refused": f"{type(error).__name__}: {error}".splitlines()[0]}
        return {"seconds": time.monotonic() - began}


def _patches(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> list[CheckpointWeightPatch]:
    found = []
    for name, weight in after.items():
        indices = (weight.view(torch.int16) != before[name].view(torch.int16)).flatten().nonzero().flatten()
        if len(indices):
            values = weight.flatten()[indices]
            found.append(CheckpointWeightPatch(name, tuple(weight.shape), weight.dtype, values, indices))
    return found
