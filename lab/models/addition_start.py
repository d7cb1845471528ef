"""A tiny model that adds two-digit numbers right in three of ten samples, for reinforcement learning to begin with.

`write(directory, seed)` trains the catalogue's tiny-qwen3 with supervision on `38+54=`, `92`, first on right answers,
then on answers of which seven in ten are wrong by 1, 2 or 10: as after demonstrations of people, it knows the sum and
more often says something else. What is left to reinforce is what it says.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from hetrl.describe.experiment import Data
from hetrl.runtime.data.prompts import Prompt, open_source
from hetrl.runtime.weights.tiny_model import CHARACTERS, END_ID, SPECIAL_TOKENS, write_tiny_model

BATCH = 256
RIGHT_STEPS, RIGHT_RATE = 800, 2e-3
MIXED_STEPS, MIXED_RATE = 400, 5e-4
DECAY = 0.4  # of the steps on right answers, the last ones: the rate falls to zero; it does through all of the others
WRONG, ERRORS = 0.7, (-10, -2, -1, 1, 2, 10)
PROMPT_TOKENS, RESPONSE_TOKENS = 6, 4  # `38+54=`, three digits and an end
OTHER_PROMPTS = 10_000_000  # numbers of prompts that reinforcement learning does not reach
CHECKED = 1024  # prompts


def write(directory: Path, seed: int) -> float:
    """Write the model's directory; return the share of its samples that is right."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)  # the sums of more have no fixed order
    chance = random.Random(seed)
    source = open_source(Data(kind="arithmetic", seed=seed)).source
    write_tiny_model(directory)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory)).float()
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0)
    for step in range(RIGHT_STEPS + MIXED_STEPS):
        optimizer.param_groups[0]["lr"] = rate_of(step)
        shown = [source(OTHER_PROMPTS + step * BATCH + number) for number in range(BATCH)]
        if step >= RIGHT_STEPS:
            shown = [_maybe_wrong(prompt, chance) for prompt in shown]
        tokens, labels = demonstrations(shown)
        loss = model(tokens, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return share_right(model, [source(2 * OTHER_PROMPTS + number) for number in range(CHECKED)])


def rate_of(step: int) -> float:
    """Return the rate of learning of a step."""
    if step < RIGHT_STEPS:
        return RIGHT_RATE * min(1.0, (RIGHT_STEPS - step) / (DECAY * RIGHT_STEPS))
    return MIXED_RATE * (1 - (step - RIGHT_STEPS) / MIXED_STEPS)


def _maybe_wrong(prompt: Prompt, chance: random.Random) -> Prompt:
    if chance.random() >= WRONG:
        return prompt
    return replace(prompt, answer=str(max(0, int(prompt.answer) + chance.choice(ERRORS))))


def demonstrations(prompts: list[Prompt]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens [n, prompt + response] and labels of the same shape, -100 where nothing is learnt."""
    tokens = torch.zeros(len(prompts), PROMPT_TOKENS + RESPONSE_TOKENS, dtype=torch.long)
    labels = torch.full_like(tokens, -100)
    for row, prompt in enumerate(prompts):
        answer = [*ids(prompt.answer), END_ID]
        end = PROMPT_TOKENS + len(answer)
        tokens[row, :end] = torch.tensor([*ids(prompt.text), *answer])
        labels[row, PROMPT_TOKENS:end] = tokens[row, PROMPT_TOKENS:end]
    return tokens, labels


@torch.no_grad()
def share_right(model: PreTrainedModel, prompts: list[Prompt]) -> float:
    """Return the share of prompts whose answer, sampled at temperature 1, is right."""
    tokens = torch.tensor([ids(prompt.text) for prompt in prompts])
    for _ in range(RESPONSE_TOKENS):
        chosen = torch.multinomial(model(tokens).logits[:, -1].softmax(-1), 1)
        tokens = torch.cat([tokens, chosen], dim=1)
    right = 0
    for prompt, said in zip(prompts, tokens[:, PROMPT_TOKENS:].tolist(), strict=True):
        answer = [*ids(prompt.answer), END_ID]
        right += said[: len(answer)] == answer
    return right / len(prompts)


def ids(text: str) -> list[int]:
    """Return the tokens of a text, one per character."""
    return [len(SPECIAL_TOKENS) + CHARACTERS.index(character) for character in text]
