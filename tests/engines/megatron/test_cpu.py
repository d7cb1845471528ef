from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

from hetrl.errors import HetrlError
from hetrl.runtime.megatron import cpu as megatron_cpu


def test_another_version_of_megatron_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron.core.__version__", "0.17.0")
    with pytest.raises(HetrlError, match=r"megatron-core 0\.17\.0 is installed, hetrl is made for 0\.16\.1"):
        megatron_cpu.install()


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        ("megatron.core.optimizer.clip_grads", "clip_grad_by_total_norm_fp32"),
        ("megatron.core.optimizer.distrib_optimizer", "DistributedOptimizer"),
        ("megatron.core.tensor_parallel.random", "_get_cuda_rng_state"),
    ],
)
def test_a_name_that_is_gone_is_named(monkeypatch: pytest.MonkeyPatch, owner: str, name: str) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    module = importlib.import_module(owner)
    monkeypatch.delattr(module, name)
    with pytest.raises(HetrlError, match=f"{owner} has no {name}"):
        megatron_cpu.install()


def test_nothing_is_replaced_where_cuda_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    clip_grads = importlib.import_module("megatron.core.optimizer.clip_grads")
    before = dict(vars(clip_grads))
    assert megatron_cpu.install() is False
    assert dict(vars(clip_grads)) == before


def test_an_engine_is_imported_without_a_compiler() -> None:
    script = (
        "import sys, torch, hetrl.runtime.megatron.engine\n"
        "print('torch._inductor.compile_fx' in sys.modules, torch.compile.__module__)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout == "False torch\n", done.stderr


def test_what_is_compiled_elsewhere_runs_as_it_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with megatron_cpu.uncompiled():
        compiled = importlib.import_module("torch").compile
    function = test_an_engine_is_imported_without_a_compiler
    assert compiled(function) is function
    assert compiled(dynamic=True)(function) is function
