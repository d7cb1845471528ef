"""The measurements themselves, on this machine's processor: the layer computes what it says, the command writes it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from hetrl.describe.measured_files import read_file
from hetrl.errors import HetrlError
from hetrl.measure.profile_fit import layer_work
from hetrl.runtime.instruments.engines import DECODED_SEQUENCES, DECODED_TOKENS, decoding, training_steps
from hetrl.runtime.instruments.kernels import all_reduces
from hetrl.runtime.instruments.layer import POINTS, Layer
from hetrl.runtime.instruments.timing import Repetitions
from hetrl.workload import architecture
from launch.cli import main

CPU = torch.device("cpu")
ONCE = Repetitions(warm_up=1, count=2, seconds=1.0)
MODELS = ["tiny-qwen3", "mpt-1b", "qwen2.5-0.5b"]


@pytest.mark.parametrize("name", MODELS)
def test_a_layer_has_the_catalogues_parameters_and_flops(name: str) -> None:
    model = architecture(name)
    layer = Layer(model, 64)
    assert sum(one.numel() for one in layer.parameters() if one.ndim == 2) == model.layer_matrix_parameters
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        layer(torch.randn(2, 64, model.hidden))
    unit, work = layer_work("prefill layer", name, "fp32", 2, 64)
    masked = 2 * 64 * model.heads * model.head_dim * 2 * 64  # the half that the counter charges and causality spares
    assert (unit, work + masked) == ("flops", counter.get_total_flops())


@pytest.mark.parametrize("name", MODELS)
def test_decode_continues_what_prefill_computed(name: str) -> None:
    torch.manual_seed(0)
    model = architecture(name)
    layer = Layer(model, 12).requires_grad_(False)
    x = torch.randn(3, 12, model.hidden)
    keys, values = (tensor.contiguous() for tensor in layer._heads(x, 0)[1:])
    keys[:, :, -1:], values[:, :, -1:] = 0, 0  # the last token brings its own
    torch.testing.assert_close(layer.decode(x[:, -1:], keys, values), layer(x)[:, -1:], rtol=1e-4, atol=1e-4)


def test_points_are_held_out_in_every_phase() -> None:
    for points in POINTS.values():
        sizes = [(point.kind, point.batch, point.tokens) for point in points]
        assert len(set(sizes)) == len(sizes)
        for kind in {point.kind for point in points}:
            uses = {point.use for point in points if point.kind == kind}
            assert uses == {"fit", "held out"}


def test_quick_measures_this_processor(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    options = ["--quick", "--gpu", "cpu", "--architecture", "tiny-qwen3", "--out", str(tmp_path / "here.json")]
    assert main(["profile", "--json", *options]) == 0
    assert json.loads(capfd.readouterr().out) == json.loads((tmp_path / "here.json").read_text())
    found = read_file(tmp_path / "here.json")
    assert {one.kind for one in found.measurements} == {
        *("matmul", "copy", "all-reduce"),
        *("prefill layer", "decode layer", "training layer"),
    }
    assert found.skipped == ()
    assert found.shares.keys() == {"decode", "prefill", "training"}
    assert len(found.checks) == sum(point.use == "held out" for point in POINTS["cpu"])
    assert found.exchange is not None
    assert found.software["torch"] == torch.__version__


def test_an_all_reduce_that_cannot_start_is_an_error_with_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-interface")
    with pytest.raises(HetrlError, match="rank [01]: RuntimeError"):
        list(all_reduces(CPU, ONCE))


def test_a_megatron_step_and_a_vllm_server_are_measured() -> None:
    (step,) = training_steps(CPU, ONCE)
    assert (step.unit, step.work) == ("tokens", 8 * 128)
    assert 1 <= len(step.seconds) <= 2
    (decoded,) = decoding(CPU, ONCE, 150.0)
    assert decoded.work == DECODED_SEQUENCES * DECODED_TOKENS
    assert all(seconds > 0 for seconds in decoded.seconds)
