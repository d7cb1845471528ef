"""Prompts as token ids, through the tokenizer's own chat template."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment, Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from hetrl.describe.experiment import Data
from hetrl.errors import UsageError
from hetrl.runtime.data.prompts import Prompt

Encoder = Callable[[Prompt], tuple[int, ...]]
JudgedEncoder = Callable[[Prompt, Sequence[int], Sequence[int]], tuple[int, ...]]
# Templates that write a date get this one, which those of Llama 3 fall back to: a run that resumes on another day must
# see the same prompts.
TODAY = datetime(2024, 7, 26)


@dataclass(frozen=True)
class ChatTemplate:
    """A compiled template of a `source`; `special_tokens` are its variables `bos_token`, `eos_token` and so on."""

    path: Path
    source: str
    template: Template
    special_tokens: Mapping[str, str]

    def render(self, messages: list[dict[str, str]], arguments: Mapping[str, Any], *, answered: bool = False) -> str:
        """Return the conversation as text that ends where the assistant begins, or, `answered`, behind its answer.

        The variables are those of transformers' `apply_chat_template(add_generation_prompt=not answered)`:
        https://huggingface.co/docs/transformers/chat_templating_writing
        """
        variables: dict[str, Any] = {"messages": messages, "tools": None, "documents": None, **self.special_tokens}
        try:
            return self.template.render({**variables, "add_generation_prompt": not answered, **arguments})
        except (TemplateError, TypeError, ValueError) as error:
            raise UsageError(
                f"{self.path}: the chat template failed: {error}; see data.system and data.template_arguments, "
                "or set data.template: plain"
            ) from None


def encoder_of(tokenizer_directory: Path, data: Data) -> Encoder:
    """Return the function from a prompt to its token ids.

    `tokenizer_directory` holds tokenizer.json and, for chats, chat_template.jinja or tokenizer_config.json. With
    `data.template` auto, a chat template is used where there is one. A chat is an optional system message and the
    question with `data.instruction` on the line below; it brings its own special tokens. A plain prompt is the same
    text without roles, with the special tokens that the tokenizer puts around a text. Raises UsageError where
    template or tokenizer cannot be read, or `data` asks for what the tokenizer does not have.
    """
    tokenizer = read_tokenizer(tokenizer_directory)
    template = None if data.template == "plain" else read_chat_template(tokenizer_directory)
    if data.template == "chat" and template is None:
        raise UsageError(f"data.template: {tokenizer_directory} has no chat template; set data.template: plain")
    if template is None and data.system is not None:
        raise UsageError("data.system: a plain prompt has no system message; put its text into data.instruction")

    def encode(prompt: Prompt) -> tuple[int, ...]:
        if template is None:
            return tuple(tokenizer.encode(_question(prompt, data)).ids)
        text = template.render(_messages(prompt, data), data.template_arguments)
        return tuple(tokenizer.encode(text, add_special_tokens=False).ids)

    return encode


def judged_text_encoder(policy: Path, judge: Path, data: Data) -> JudgedEncoder:
    """Return the function from a prompt, its tokens and those of a response to the tokens that a reward model reads.

    `policy` and `judge` are the directories of the two models. Where tokenizer and template are the same, these are the
    policy's own tokens. Otherwise the response's text, without special tokens, is encoded anew behind its question: as
    a conversation where the judge has a chat template (and `data.template` is not plain), else as one text.
    """
    theirs = None if data.template == "plain" else read_chat_template(judge)
    ours = None if data.template == "plain" else read_chat_template(policy)
    of_policy, of_judge = read_tokenizer(policy), read_tokenizer(judge)
    same = (policy / "tokenizer.json").read_bytes() == (judge / "tokenizer.json").read_bytes()
    if same and (ours and ours.source) == (theirs and theirs.source):
        return lambda prompt, tokens, response: (*tokens, *response)

    def encode(prompt: Prompt, tokens: Sequence[int], response: Sequence[int]) -> tuple[int, ...]:
        answer = of_policy.decode(list(response), skip_special_tokens=True)
        if theirs is None:
            return tuple(of_judge.encode(_question(prompt, data) + answer).ids)
        messages = [*_messages(prompt, data), {"role": "assistant", "content": answer}]
        text = theirs.render(messages, data.template_arguments, answered=True)
        return tuple(of_judge.encode(text, add_special_tokens=False).ids)

    encode(Prompt("", ""), (), ())  # a template that refuses such messages says so before anything is sampled
    return encode


def _question(prompt: Prompt, data: Data) -> str:
    return prompt.text if data.instruction is None else f"{prompt.text}\n{data.instruction}"


def _messages(prompt: Prompt, data: Data) -> list[dict[str, str]]:
    system = [] if data.system is None else [{"role": "system", "content": data.system}]
    return [*system, {"role": "user", "content": _question(prompt, data)}]


def read_tokenizer(directory: Path) -> Tokenizer:
    """Return the tokenizer of a model's directory, which cuts nothing off; UsageError where there is none."""
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise UsageError(f"{path}: No such file; a model's directory needs its tokenizer.json")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise UsageError(f"{path}: not a tokenizer: {error}") from None
    tokenizer.no_truncation()  # files keep how they were last used, which would cut off an answer
    tokenizer.no_padding()
    return tokenizer


def read_chat_template(directory: Path) -> ChatTemplate | None:
    """Return the template of a tokenizer's directory, None where it has none; UsageError where it is not one.

    chat_template.jinja goes before the key `chat_template` of tokenizer_config.json, and the special tokens there go
    before those of special_tokens_map.json, as in transformers.
    """
    config_path, path = directory / "tokenizer_config.json", directory / "chat_template.jinja"
    config = _read_json(config_path)
    special = {**_read_json(directory / "special_tokens_map.json"), **config}
    source = path.read_text(encoding="utf-8") if path.is_file() else _default(config.get("chat_template"))
    if source is None:
        return None
    place = path if path.is_file() else config_path
    try:
        template = _environment().from_string(source)
    except TemplateError as error:
        raise UsageError(f"{place}: not a chat template: {error}") from None
    return ChatTemplate(place, source, template, _special_tokens(special))


def _read_json(path: Path) -> dict[str, Any]:
    """Return what a file has, nothing where it is not there."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise UsageError(f"{path} is not JSON (line {error.lineno})") from None
    return content if isinstance(content, dict) else {}


def _default(templates: Any) -> str | None:
    """Return the one template, or of several the one named default."""
    if isinstance(templates, list):
        return next((str(entry["template"]) for entry in templates if entry.get("name") == "default"), None)
    return templates if isinstance(templates, str) else None


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Return `bos_token` and its like; each is a text, or an object with its text under `content`."""
    named = {key: value for key, value in config.items() if key.endswith("_token")}
    texts = {key: value.get("content") if isinstance(value, dict) else value for key, value in named.items()}
    return {key: text for key, text in texts.items() if isinstance(text, str)}


class _Generation(Extension):
    """`{% generation %}..{% endgeneration %}` marks what the assistant wrote; here it is only its content."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> Environment:
    """Return the sandbox that transformers renders templates in: a template comes with a model, from anyone."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = TODAY.strftime
    return environment


def _to_json(value: Any, **options: Any) -> str:
    return json.dumps(value, **{"ensure_ascii": False, **options})


def _raise(message: str) -> None:
    raise TemplateError(message)
