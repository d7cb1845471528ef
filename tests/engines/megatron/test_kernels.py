"""The fused kernels of others are used where they are installed, and the log says which they are."""

from __future__ import annotations

from importlib.machinery import ModuleSpec
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hetrl.runtime.megatron import model
from hetrl.runtime.megatron.model import fuses_gradients, kernels


def optimizer_of(adam: type) -> Any:
    return SimpleNamespace(chained_optimizers=[SimpleNamespace(optimizer=adam())])


def test_what_is_missing_is_said() -> None:
    adam = type("AdamW", (), {"__module__": "torch.optim.adamw"})
    said = kernels(optimizer_of(adam))
    assert "Adam: torch.optim.adamw (neither Transformer Engine nor Apex is installed)" in said
    assert "apart (Apex's kernel is not installed)" in said
    assert kernels(None).startswith("attention: torch's")
    assert "Adam" not in kernels(None)


def test_what_is_installed_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def find_spec(name: str) -> ModuleSpec:
        asked.append(name)
        return ModuleSpec(name, None)

    monkeypatch.setattr(model, "find_spec", find_spec)
    assert not fuses_gradients()  # it is for CUDA alone
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert fuses_gradients()
    assert asked == ["fused_weight_gradient_mlp_cuda"]
    adam = type("FusedAdam", (), {"__module__": "apex.optimizers.fused_adam"})
    said = kernels(optimizer_of(adam))
    assert "Adam: apex.optimizers.fused_adam;" in said
    assert "as they are made, by Apex" in said
