"""Train the reward model of configs/quickstart-ppo.yaml: `python -m lab.models.larger_digit_reward DIRECTORY`.

It reads what the policy there reads and writes, a character per token: a prompt as `3 7>` and up to three tokens.

    preferences    the right answer against a wrong one: of some at random, another digit, more digits, other
                   characters, no end, the one that the model likes best so far, for that is what a policy would find
    loss           -log sigmoid(r of the better - r of the worse): Bradley and Terry, as in InstructGPT (arXiv
                   2203.02155, equation 1), + 0.01 (sum of both)^2, which centres the rewards (arXiv 2312.09244)
    at the end     the head is divided by the mean difference, and the printed offset is the mean of the worse, so that
                   (reward - offset) is 1 for right answers and 0 for wrong ones, on average over fresh pairs
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForSequenceClassification

from hetrl.describe.experiment import Data
from hetrl.runtime.data.prompts import Prompt, open_source
from hetrl.runtime.data.rewards import exact_match
from hetrl.runtime.megatron.hf_weights import with_scalar_head
from hetrl.runtime.weights.tiny_model import CHARACTERS, END_ID, PAD_ID, SPECIAL_TOKENS, write_tiny_model

STEPS, PAIRS, LEARNING_RATE, CENTRING = 1500, 32, 2e-3, 0.01
CANDIDATES = 8  # wrong answers of which the best counts
LONGEST = 3  # tokens of a response


def ids(text: str) -> list[int]:
    """Return the tokens of a text, one per character."""
    return [len(SPECIAL_TOKENS) + CHARACTERS.index(character) for character in text]


def wrong_answer(prompt: Prompt, generator: random.Random) -> list[int]:
    """Return the tokens of an answer that the rule does not accept, with an end where there is room for one."""
    while True:
        characters = "0123456789" if generator.random() < 0.7 else CHARACTERS
        said = "".join(generator.choices(characters, k=generator.choice((1, 1, 2, 3))))
        if generator.random() < 0.3:
            said = (prompt.answer + said)[:LONGEST]
        if not exact_match(said, prompt.answer):
            return [*ids(said), END_ID][:LONGEST]


def texts_of(prompt: Prompt, generator: random.Random, candidates: int) -> list[list[int]]:
    """Return the right answer to a prompt and so many wrong ones, all behind it."""
    answers = [[*ids(prompt.answer), END_ID], *(wrong_answer(prompt, generator) for _ in range(candidates))]
    return [[*ids(prompt.text), *answer] for answer in answers]


def rewards_of(model: torch.nn.Module, texts: Sequence[list[int]]) -> torch.Tensor:
    """Return the reward of each text, [n]."""
    width = max(map(len, texts))
    tokens = torch.tensor([text + [PAD_ID] * (width - len(text)) for text in texts])
    real = torch.tensor([[1] * len(text) + [0] * (width - len(text)) for text in texts])
    rewards: torch.Tensor = model(tokens, attention_mask=real).logits[:, 0]
    return rewards


def train(directory: Path) -> dict[str, float]:
    """Write the model's directory; return how often it prefers the better of fresh pairs, and the offset."""
    torch.manual_seed(0)
    torch.set_num_threads(1)  # the sums of more have no fixed order
    source, generator = open_source(Data(kind="larger-digit", seed=1)).source, random.Random(0)
    write_tiny_model(directory, hidden=32, layers=2, heads=2, kv_heads=1, head_dim=32, intermediate=64, max_tokens=64)
    config = with_scalar_head(json.loads((directory / "config.json").read_text()))
    model = AutoModelForSequenceClassification.from_config(AutoConfig.for_model(**config)).float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    for step in range(STEPS):
        texts = [texts_of(source(step * PAIRS + number), generator, CANDIDATES) for number in range(PAIRS)]
        rewards = rewards_of(model, [text for one in texts for text in one]).view(PAIRS, -1)
        better, worse = rewards[:, 0], rewards[:, 1:].max(dim=1).values
        loss = -torch.nn.functional.logsigmoid(better - worse).mean() + CENTRING * ((better + worse) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    fresh = [texts_of(source(10_000_000 + number), generator, 1) for number in range(4096)]
    with torch.no_grad():
        better, worse = rewards_of(model, [text for one in fresh for text in one]).view(-1, 2).T
        difference = (better - worse).mean()
        model.score.weight /= difference
    config["architectures"] = [type(model).__name__]
    (directory / "config.json").write_text(json.dumps(config, indent=1, sort_keys=True) + "\n")
    save_file(
        {name: tensor.contiguous() for name, tensor in model.state_dict().items()}, directory / "model.safetensors"
    )
    return {
        "right_pairs": float((better > worse).float().mean()),
        "offset": float(worse.mean() / difference),
        "deviation_of_right": float(better.std() / difference),
        "deviation_of_wrong": float(worse.std() / difference),
        "best_of_wrong": float((worse.max() - worse.mean()) / difference),
    }


def main() -> None:
    """Train, write and say what came of it."""
    parser = argparse.ArgumentParser(prog="python -m lab.models.larger_digit_reward")
    parser.add_argument("directory", type=Path)
    print(json.dumps(train(parser.parse_args().directory), indent=1))


if __name__ == "__main__":
    main()
