"""Versions of bf16 weights as an optimiser makes them, after 0, 1, 4 and 16 steps: for the benches `sync` and `pause`.

Run as a process (torch wants all cores and much memory): `_weight_steps.py DIRECTORY SIZE RATE`. The model is a Qwen3
with random weights (N(0, 0.02), as pretrained ones are about); its steps are those of a policy gradient on random
tokens with advantages of unit variance, with AdamW as hetrl configures it (float32 main weights, gradient norm clipped
to 1). Some steps come before version 0: what a version changes hangs on how the optimiser's moments stand.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

STEPS = (0, 1, 4, 16)
WARM_UP_STEPS = 6
SEQUENCES, TOKENS = 4, 32
BETAS, EPS, CLIP = (0.9, 0.95), 1e-8, 1.0  # hetrl.runtime.megatron.optimizer
SIZES = {
    "tiny": {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128, "vocab_size": 500},
    "0.1B": {"hidden_size": 768, "num_hidden_layers": 10, "intermediate_size": 2304, "vocab_size": 16000},
    "0.35B": {"hidden_size": 1024, "num_hidden_layers": 21, "intermediate_size": 3072, "vocab_size": 16000},
}


def model_of(size: str) -> Qwen3ForCausalLM:
    """Return the model in bf16, drawn from a seed."""
    torch.manual_seed(0)
    shape = SIZES[size]
    heads = {"num_attention_heads": shape["hidden_size"] // 64, "num_key_value_heads": shape["hidden_size"] // 64}
    model = Qwen3ForCausalLM(Qwen3Config(**shape, **heads, head_dim=64, tie_word_embeddings=True))
    return model.to(torch.bfloat16)


class Training:
    """A model, its float32 main weights and their optimiser."""

    def __init__(self, size: str, rate: float) -> None:
        self.model = model_of(size)
        self.weights = dict(self.model.named_parameters())
        self.main = {name: weight.detach().float() for name, weight in self.weights.items()}
        self.optimizer = torch.optim.AdamW(self.main.values(), lr=rate, betas=BETAS, eps=EPS, weight_decay=0.0)
        self.generator = torch.Generator().manual_seed(1)

    def step(self) -> None:
        """Take one step of a policy gradient."""
        vocabulary = self.model.config.vocab_size
        tokens = torch.randint(vocabulary, (SEQUENCES, TOKENS), generator=self.generator)
        advantages = torch.randn(SEQUENCES, 1, generator=self.generator)
        logprobs = self.model(tokens[:, :-1]).logits.float().log_softmax(-1)
        taken = logprobs.gather(2, tokens[:, 1:, None])[..., 0]
        (-(advantages * taken).mean()).backward()
        for name, main in self.main.items():
            main.grad = self.weights[name].grad.float()
            self.weights[name].grad = None
        torch.nn.utils.clip_grad_norm_(self.main.values(), CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad()
        with torch.no_grad():
            for name, main in self.main.items():
                self.weights[name].copy_(main)


def main() -> None:
    """Write `steps-N.safetensors` for each N and the model's configuration; print how many parameters it has."""
    directory, size, rate = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
    training = Training(size, rate)
    training.model.config.architectures = [type(training.model).__name__]
    training.model.config.save_pretrained(directory / "model")
    for _ in range(WARM_UP_STEPS):
        training.step()
    for step in range(max(STEPS) + 1):
        if step in STEPS:
            weights = {name: weight.detach() for name, weight in training.weights.items()}
            save_file(weights, directory / f"steps-{step}.safetensors")
        if step < max(STEPS):
            training.step()
    print(json.dumps(sum(weight.numel() for weight in training.weights.values())))


if __name__ == "__main__":
    main()
