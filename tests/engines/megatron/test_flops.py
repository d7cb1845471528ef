"""The exact counts of the cost model against PyTorch's own counter on a real tiny model."""

from __future__ import annotations

import pytest

from hetrl.cost.compute import StageShape, forward_flops
from hetrl.cost.efficiency import calibrated
from hetrl.workload import architecture_from_hf_config

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.engines
SIZES = {
    "hidden_size": 48,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 96,
    "max_position_embeddings": 64,
}
SEQUENCE, BATCH = 32, 2


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "llama"])
@pytest.mark.parametrize("tied", [False, True])
def test_flops_and_parameters_are_those_of_a_real_model(kind: str, tied: bool) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    values = {**SIZES, "tie_word_embeddings": tied}
    if kind == "qwen2":  # the family has no head_dim of its own
        values["head_dim"] = 12
    config = transformers.AutoConfig.for_model(kind, **values)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    ours = architecture_from_hf_config({**values, "model_type": kind}, kind)
    assert sum(parameter.numel() for parameter in model.parameters()) == ours.parameters

    tokens = torch.zeros((BATCH, SEQUENCE), dtype=torch.long)
    with FlopCounterMode(display=False) as forward:
        logits = model(tokens, use_cache=False).logits
    counted = forward.get_total_flops()
    with FlopCounterMode(display=False) as backward:
        logits.sum().backward()

    shape = StageShape(ours, ours.layers, True, True, True, 1, calibrated().rates("cpu"), weight_bytes=4)
    assert shape.parameters == ours.parameters
    causal = BATCH * SEQUENCE * forward_flops(shape, SEQUENCE)
    linear = BATCH * SEQUENCE * forward_flops(shape, 0)
    # Eager attention multiplies the masked half as well, and rotary angles are one small product per position.
    whole = linear + 2 * (causal - linear)
    angles = counted - whole
    assert 0 <= angles <= 2 * BATCH * SEQUENCE * ours.head_dim
    assert backward.get_total_flops() == pytest.approx(2 * whole, rel=1e-3)
