"""Write what TRL's GRPOTrainer makes of the steps of `trl_cases`, for `test_trl` to read.

    pip install --no-deps --target DIR -r requirements/trl.lock
    HF_HUB_OFFLINE=1 PYTHONPATH=.:DIR .venv/bin/python -m tests.engines.megatron.trl_reference

The trainer is TRL's own, on the model of transformers in float32. It gets tokens, sampler's log-probs and rewards, pads
them, and takes advantages, importance weights, log-probs, loss and, with torch, the gradients of the loss from there.
"""

from __future__ import annotations

import tempfile
from itertools import chain
from typing import Any

import torch
import transformers
import trl
from datasets import Dataset
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.utils import pad

from tests.engines.megatron.megatron_worlds import weights
from tests.engines.megatron.trl_cases import (
    CASES,
    LONGEST,
    MODELS,
    PAD_TOKEN,
    REFERENCE,
    REWARDS,
    VOCABULARY,
    Case,
    groups,
    reference_logprobs,
)

METRICS = {"kl": "kl", "clip_fraction": "clip_ratio/region_mean", "entropy": "entropy"}  # ours and TRL's
SAMPLES = [(group, sample) for group in groups() for sample in group.samples]
PROMPTS = [{"prompt": group.prompt.text} for group, _ in SAMPLES]


def rollout(prompts: list[str], trainer: GRPOTrainer) -> dict[str, Any]:
    """Return the samples as TRL takes them from a sampler."""
    return {
        "prompt_ids": [list(group.prompt_tokens) for group, _ in SAMPLES],
        "completion_ids": [list(sample.tokens) for _, sample in SAMPLES],
        "logprobs": [list(sample.logprobs) for _, sample in SAMPLES],
    }


def reward(completions: list[str], **_: Any) -> list[float]:
    """Return the rewards of the samples."""
    return list(chain(*REWARDS))


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of a word for every token."""
    words = {f"w{token}": token for token in range(VOCABULARY)}
    padding = f"w{PAD_TOKEN}"
    model = Tokenizer(WordLevel(words, unk_token="w0"))
    return PreTrainedTokenizerFast(tokenizer_object=model, pad_token=padding, eos_token=padding)


def trainer_of(config: dict[str, Any], case: Case, directory: str) -> GRPOTrainer:
    """Return TRL's trainer of a model with our weights; without `beta`, for which it would load a reference model."""
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), attn_implementation="eager").float()
    model.load_state_dict(dict(weights(config)))
    settings = {name: value for name, value in case.theirs.items() if name != "beta"}
    args = GRPOConfig(
        directory,
        per_device_train_batch_size=len(SAMPLES),
        num_generations=len(REWARDS[0]),
        max_completion_length=LONGEST,
        gradient_checkpointing=False,
        beta=0.0,
        use_bias_correction_kl=False,  # the term as in GRPO (arXiv 2402.03300, equation 3), without the ratio
        bf16=False,
        use_cpu=True,
        report_to="none",
        **settings,
    )
    data = Dataset.from_list(PROMPTS)
    return GRPOTrainer(model, reward, args=args, train_dataset=data, processing_class=tokenizer(), rollout_func=rollout)


def step(config: dict[str, Any], case: Case, directory: str) -> dict[str, torch.Tensor]:
    """Return log-probs and advantages, loss, metrics and gradients of one step."""
    trainer = trainer_of(config, case, directory)
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    if case.fresh:  # as with TRL's vLLM, whose weights need no push here
        trainer.use_vllm, trainer._last_loaded_step = True, trainer.state.global_step
    inputs = trainer._generate_and_score_completions(PROMPTS)
    if not case.fresh:
        inputs["old_per_token_logps"] = inputs["sampling_per_token_logps"]
    lengths = [len(sample.tokens) for _, sample in SAMPLES]
    trainer.beta = case.theirs.get("beta", 0.0)
    if trainer.beta:
        given = torch.from_numpy(reference_logprobs()).split(lengths)
        inputs["ref_per_token_logps"] = pad(list(given), padding_value=0.0, padding_side="right")
    with torch.no_grad():
        ids, mask = (
            torch.cat([inputs[f"prompt_{kind}"], inputs[f"completion_{kind}"]], dim=1) for kind in ("ids", "mask")
        )
        width = inputs["completion_ids"].shape[1]
        logprobs, _, _ = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, width)
    loss = trainer.compute_loss(trainer.model, inputs)
    loss.backward()
    metrics = {ours: trainer._metrics["train"][name] for ours, name in METRICS.items()}
    return {
        "logprobs": logprobs[inputs["completion_mask"].bool()],
        "advantages": inputs["advantages"],
        "metric/loss": loss.detach(),
        **{f"metric/{name}": torch.tensor(values[0]) for name, values in metrics.items() if values},
        **{f"gradient/{name}": parameter.grad for name, parameter in trainer.model.named_parameters()},
    }


def main() -> None:
    """Take every step and write the file."""
    torch.set_num_threads(1)
    found = {}
    with tempfile.TemporaryDirectory() as directory:
        for model, config in MODELS.items():
            for case, settings in CASES.items():
                taken = step(config, settings, directory)
                found |= {f"{model}/{case}/{name}": tensor.contiguous() for name, tensor in taken.items()}
    packages = (trl, transformers, torch)
    save_file(found, REFERENCE, metadata={package.__name__: package.__version__ for package in packages})


if __name__ == "__main__":
    main()
