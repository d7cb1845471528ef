"""What a reward model reads: the policy's tokens where both read alike, else the text in its own words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from hetrl.describe.experiment import Data
from hetrl.errors import UsageError
from hetrl.runtime.data.chat import encoder_of, judged_text_encoder
from hetrl.runtime.data.prompts import Prompt
from hetrl.runtime.weights.tiny_model import CHARACTERS, END_ID, write_tiny_model

CHAT = (
    "{% for one in messages %}({{ one.role }}){{ one.content }}{% endfor %}"
    "{% if add_generation_prompt %}(assistant){% endif %}"
)
PROMPT, RESPONSE = Prompt("what is 2+3?", "5"), "5!"


def directory(path: Path, template: str | None = None, reverse: bool = False) -> Path:
    """Write a tokenizer, with its characters numbered the other way round where it is to be another one."""
    write_tiny_model(path)
    if reverse:
        tokenizer = json.loads((path / "tokenizer.json").read_text())
        vocabulary = tokenizer["model"]["vocab"]
        tokenizer["model"]["vocab"] = {token: len(vocabulary) - 1 - number for token, number in vocabulary.items()}
        for added in tokenizer["added_tokens"]:
            added["id"] = tokenizer["model"]["vocab"][added["content"]]
        (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    if template:
        (path / "chat_template.jinja").write_text(template)
    return path


def judged(policy: Path, judge: Path, **keys: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return what the policy read and wrote, and what its judge reads of it."""
    data = Data(kind="jsonl", path="x", **keys)
    prompt = encoder_of(policy, data)(PROMPT)
    response = (*Tokenizer.from_file(str(policy / "tokenizer.json")).encode(RESPONSE).ids, END_ID)
    return (*prompt, *response), judged_text_encoder(policy, judge, data)(PROMPT, prompt, response)


def text_of(directory: Path, tokens: tuple[int, ...]) -> str:
    text: str = Tokenizer.from_file(str(directory / "tokenizer.json")).decode(list(tokens), skip_special_tokens=False)
    return text


def test_the_same_tokenizer_and_template_read_the_policys_own_tokens(tmp_path: Path) -> None:
    for template in (None, CHAT):
        policy, judge = (directory(tmp_path / f"{name}-{bool(template)}", template) for name in ("policy", "judge"))
        written, read = judged(policy, judge)
        assert read == written and read[-1] == END_ID


def test_another_tokenizer_reads_question_and_response_without_the_policys_special_tokens(tmp_path: Path) -> None:
    policy, judge = directory(tmp_path / "policy"), directory(tmp_path / "judge", reverse=True)
    written, read = judged(policy, judge, instruction="think")
    assert read != written
    assert text_of(judge, read) == "what is 2+3?\nthink5!"


def test_a_judge_with_a_template_reads_a_conversation_that_ends_with_the_answer(tmp_path: Path) -> None:
    policy, judge = directory(tmp_path / "policy"), directory(tmp_path / "judge", CHAT)
    _, read = judged(policy, judge)
    assert text_of(judge, read) == "(user)what is 2+3?(assistant)5!"
    other = directory(tmp_path / "other", CHAT.replace("(", "[").replace(")", "]"))
    _, read = judged(other, judge, system="be brief")
    assert text_of(judge, read) == "(system)be brief(user)what is 2+3?(assistant)5!"


def test_how_a_tokenizer_was_last_used_does_not_cut_off_the_answer(tmp_path: Path) -> None:
    policy, judge = directory(tmp_path / "policy"), directory(tmp_path / "judge", reverse=True)
    used = Tokenizer.from_file(str(judge / "tokenizer.json"))
    used.enable_truncation(4)
    used.enable_padding(length=64)
    used.save(str(judge / "tokenizer.json"))
    _, read = judged(policy, judge)
    assert text_of(judge, read) == "what is 2+3?5!"


def test_a_judge_without_a_tokenizer_or_whose_template_refuses_is_an_error_at_once(tmp_path: Path) -> None:
    policy, data = directory(tmp_path / "policy"), Data(kind="jsonl", path="x", system="be brief")
    refusing = CHAT + "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    with pytest.raises(UsageError, match="no system"):
        judged_text_encoder(policy, directory(tmp_path / "judge", refusing), data)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="needs its tokenizer.json"):
        judged_text_encoder(policy, tmp_path / "empty", data)


def test_plain_prompts_are_judged_as_plain_text(tmp_path: Path) -> None:
    policy, judge = directory(tmp_path / "policy", CHAT), directory(tmp_path / "judge", CHAT, reverse=True)
    _, read = judged(policy, judge, template="plain")
    assert text_of(judge, read) == "what is 2+3?5!"
    assert set(text_of(judge, read)) <= set(CHARACTERS)
