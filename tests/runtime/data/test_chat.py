"""Prompts become the tokens that transformers would make of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers.utils.chat_template_utils import render_jinja_template

from hetrl.describe.experiment import Data
from hetrl.errors import UsageError
from hetrl.runtime.data.chat import encoder_of, read_chat_template
from hetrl.runtime.data.prompts import Prompt
from hetrl.runtime.weights.tiny_model import write_tiny_model

CHATML = (
    "{%- for message in messages %}\n"
    "{{- '<|' + message.role + '|' + message['content'] | trim + eos_token + '\n' }}\n"
    "{%- endfor %}\n"
    "{%- if add_generation_prompt %}{{- '<|assistant|' }}\n"
    "{%- if thinking is defined and thinking is false %}{{- '()' }}{%- endif %}{%- endif %}"
)
# What published templates use: macros, namespaces, loop controls, slices, tests, a strict order of roles, tojson.
FEATURES = """
{%- macro turn(role, text) %}{{ bos_token }}[{{ role }}] {{ text }}{{ eos_token }}{% endmacro %}
{%- set state = namespace(first=true) %}
{%- if messages[0]['role'] == 'system' %}{% set rest = messages[1:] %}{% else %}{% set rest = messages %}{% endif %}
{%- for message in rest %}
    {%- if message.role not in ['user', 'assistant'] %}{{ raise_exception('roles must alternate') }}{% endif %}
    {%- if tools is not none or documents %}{% break %}{% endif %}
    {%- generation %}{{ turn(message.role, message.content | tojson) }}{% endgeneration %}
    {%- set state.first = false %}
{%- endfor %}
{{- '[assistant]' if add_generation_prompt and not state.first }}
"""
QUESTION = Prompt("what is 2+3?", "5")
Directory = Callable[..., Path]


@pytest.fixture
def directory(tmp_path: Path) -> Directory:
    """Write the tiny tokenizer, with keys added to tokenizer_config.json and perhaps a chat_template.jinja."""

    def write(file: str | None = None, **keys: Any) -> Path:
        write_tiny_model(tmp_path)
        path = tmp_path / "tokenizer_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **keys}))
        if file is not None:
            (tmp_path / "chat_template.jinja").write_text(file)
        return tmp_path

    return write


def data(**keys: Any) -> Data:
    return Data(kind="jsonl", **keys)


def tokens_of(directory: Path, text: str) -> tuple[int, ...]:
    return tuple(Tokenizer.from_file(str(directory / "tokenizer.json")).encode(text, add_special_tokens=False).ids)


def test_without_a_template_a_prompt_is_its_text(directory: Directory) -> None:
    place = directory()
    for template in ("auto", "plain"):
        assert encoder_of(place, data(template=template))(QUESTION) == tokens_of(place, "what is 2+3?")
    with_suffix = encoder_of(place, data(instruction="think."))(QUESTION)
    assert with_suffix == tokens_of(place, "what is 2+3?\nthink.")


def test_a_plain_prompt_has_what_the_tokenizer_puts_around_a_text(directory: Directory) -> None:
    place = directory()
    tokenizer = Tokenizer.from_file(str(place / "tokenizer.json"))
    tokenizer.post_processor = TemplateProcessing(single="<eos> $A", special_tokens=[("<eos>", 1)])
    tokenizer.save(str(place / "tokenizer.json"))
    assert encoder_of(place, data())(QUESTION) == (1, *tokens_of(place, "what is 2+3?"))
    place = directory(chat_template=CHATML)
    assert encoder_of(place, data())(QUESTION)[0] != 1  # a template writes its own


@pytest.mark.parametrize("template", [CHATML, FEATURES], ids=["chatml", "features"])
@pytest.mark.parametrize("system", [None, "be brief"])
def test_a_chat_is_that_of_transformers(directory: Directory, template: str, system: str | None) -> None:
    place = directory(chat_template=template, bos_token="<unk>")
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": 'what is 2+3?\nsay "5".'})
    special = {"bos_token": "<unk>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"}
    rendered, _ = render_jinja_template(
        [messages], chat_template=template, add_generation_prompt=True, thinking=False, **special
    )
    settings = data(template="chat", system=system, instruction='say "5".', template_arguments={"thinking": False})
    encode = encoder_of(place, settings)
    assert encode(QUESTION) == tokens_of(place, rendered[0])
    assert encode(QUESTION) == encode(QUESTION)
    assert 1 in encode(QUESTION)  # the end token of a turn is one token, not its characters


def test_special_tokens_may_stand_in_a_file_of_their_own(directory: Directory) -> None:
    place = directory(chat_template="{{ bos_token }}{{ eos_token }}", eos_token="<eos>")
    (place / "special_tokens_map.json").write_text('{"bos_token": {"content": "<unk>"}, "eos_token": "<pad>"}')
    assert encoder_of(place, data())(QUESTION) == tokens_of(place, "<unk><eos>")


def test_the_file_goes_before_the_configuration_and_default_before_others(directory: Directory) -> None:
    templates = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "named"}]
    place = directory(chat_template=templates)
    assert encoder_of(place, data())(QUESTION) == tokens_of(place, "named")
    place = directory(file="from the file", chat_template=templates)
    assert encoder_of(place, data())(QUESTION) == tokens_of(place, "from the file")
    assert encoder_of(place, data(template="plain"))(QUESTION) == tokens_of(place, "what is 2+3?")


def test_special_tokens_may_be_objects_and_a_date_does_not_change(directory: Directory) -> None:
    place = directory(chat_template="{{ bos_token }}{{ strftime_now('%d %m %Y') }}", bos_token={"content": "<eos>"})
    assert encoder_of(place, data())(QUESTION) == (1, *tokens_of(place, "26 07 2024"))


@pytest.mark.parametrize(
    ("template", "settings", "message"),
    [
        (None, {"template": "chat"}, "has no chat template"),
        (None, {"system": "s"}, "data.system: a plain prompt"),
        (CHATML, {"system": "s", "template": "plain"}, "data.system: a plain prompt"),
        ("{% if %}", {}, "not a chat template"),
        ("{{ raise_exception('no system here') }}", {}, "tokenizer_config.json: the chat template failed: no system"),
        ("{{ messages.append(1) }}", {}, "the chat template failed"),
        ("{{ ''.__class__.__mro__ }}", {}, "the chat template failed"),
        ("{{ missing.attribute }}", {}, "the chat template failed"),
    ],
)
def test_what_a_tokenizer_cannot_do_is_an_error(
    directory: Directory, template: str | None, settings: dict[str, Any], message: str
) -> None:
    place = directory(**({} if template is None else {"chat_template": template}))
    with pytest.raises(UsageError, match=message):
        encoder_of(place, data(**settings))(QUESTION)


def test_a_directory_without_a_readable_tokenizer_is_an_error(tmp_path: Path) -> None:
    assert read_chat_template(tmp_path) is None
    with pytest.raises(UsageError, match=r"tokenizer\.json: No such file"):
        encoder_of(tmp_path, data())
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UsageError, match="not a tokenizer"):
        encoder_of(tmp_path, data())
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(UsageError, match="is not JSON"):
        read_chat_template(tmp_path)
