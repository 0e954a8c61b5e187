"""Templates in the styles of well-known model families render as transformers renders them, and fail politely."""

from datetime import UTC, datetime
from functools import cache
from typing import Any

import pytest
from transformers import AutoTokenizer

from kvferry_rpc.common_pb2 import ErrorCode
from router.text.chat_template import ChatTemplate, check_text
from runtime.errors import KvferryError
from tests.support.tiny_tokenizers import TINY_REAL, short_prompts

SPECIAL = {"bos_token": "<|bos|>", "eos_token": "<|end|>", "pad_token": "<|pad|>"}

CHATML = """\
{%- if messages[0].role != 'system' %}
{{- '<|im_start|>system\\nAnswer briefly.<|im_end|>\\n' }}
{%- endif %}
{% for message in messages %}
    {{- '<|im_start|>' ~ message['role'] ~ '\\n' ~ message['content'] | trim ~ '<|im_end|>' ~ '\\n' }}
{% endfor %}
{% if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{% endif %}
"""
LLAMA3 = """\
{{- bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- set preamble = messages[0]['content'] | trim -%}
    {%- set rest = messages[1:] -%}
{%- else -%}
    {%- set preamble = 'None given' -%}
    {%- set rest = messages -%}
{%- endif -%}
{{- '<|header|>system<|/header|>\\n\\nDate: ' + '%d' | replace('%d', 'unknown') + '\\n' + preamble + eos_token -}}
{%- for message in rest -%}
    {{- '<|header|>' + message.role + '<|/header|>\\n\\n' + message.content + eos_token -}}
{%- endfor -%}
{%- if tools is not none -%}{{- raise_exception('no tools') -}}{%- endif -%}
{%- if add_generation_prompt -%}{{- '<|header|>assistant<|/header|>\\n\\n' -}}{%- endif -%}
"""
MISTRAL = """\
{{ bos_token }}{% set state = namespace(turns=0, lead='') %}
{% for message in messages %}
{% if message['role'] == 'system' %}
{% set state.lead = message['content'] + '\\n\\n' %}
{% continue %}
{% endif %}
{% if (message['role'] == 'user') != (state.turns % 2 == 0) %}
{{ raise_exception('After the system message, user and assistant must take turns.') }}
{% endif %}
{% set state.turns = state.turns + 1 %}
{% if message['role'] == 'user' %}
{{ ' [INST] ' + (state.lead if loop.last else '') + message['content'] + ' [/INST]' }}
{% else %}
{% generation %}
{{ ' ' + message['content'] + eos_token }}
{% endgeneration %}
{% endif %}
{% endfor %}
"""
GEMMA = """\
{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('There is no system role.') }}{% endif %}
{%- for message in messages -%}
    {%- set name = dict(assistant='model', user='user')[message['role']] -%}
    {{ '<turn>' + name + '\\n' }}{{ message['content'] | trim }}{{ '</turn>\\n' }}
{%- endfor -%}
{% if add_generation_prompt %}{{ '<turn>model\\n' }}{% endif %}
"""
RECORD = """\
{# Messages as data, for the filters. #}
{% for message in messages %}
{{ message | tojson }} {{ dict(text=message.content, n=loop.index) | tojson(indent=2, sort_keys=true) }}
    {% if loop.index > 3 %}
        {% break %}
    {% endif %}
{% endfor %}
{{ '' if undefined_name is defined else 'end' }}
"""
STYLES = {"chatml": CHATML, "llama3": LLAMA3, "mistral": MISTRAL, "gemma": GEMMA, "record": RECORD}

CONVERSATIONS: dict[str, list[dict[str, str]]] = {
    "one": [{"role": "user", "content": "Hello <b>'you' & \"me\"</b>"}],
    "turns": [
        {"role": "user", "content": "  spaces around  \n"},
        {"role": "assistant", "content": "línea uno\nlínea dos 🚢"},
        {"role": "user", "content": "{{ 7 * 7 }} {% raise %} <|end|>"},
    ],
    "system": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": ""}],
    "order": [{"role": "assistant", "content": "first"}, {"role": "user", "content": "second"}],
    "many": [{"role": "user" if i % 2 == 0 else "assistant", "content": f"message {i}"} for i in range(9)],
}


@cache
def reference() -> Any:
    return AutoTokenizer.from_pretrained(TINY_REAL)


def reference_render(source: str, messages: list[dict[str, str]]) -> str | None:
    """What transformers renders; None where the template refuses."""
    try:
        text: str = reference().apply_chat_template(
            messages, chat_template=source, tokenize=False, add_generation_prompt=True
        )
    except Exception:
        return None
    return text


def refusal(source: str, messages: Any, **options: Any) -> KvferryError:
    with pytest.raises(KvferryError) as caught:
        ChatTemplate(source, SPECIAL, **options).render(messages)
    assert caught.value.code == ErrorCode.INVALID_REQUEST
    return caught.value


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("conversation", CONVERSATIONS)
def test_a_template_renders_as_in_transformers(style: str, conversation: str) -> None:
    messages = CONVERSATIONS[conversation]
    expected = reference_render(STYLES[style], messages)
    if expected is None:
        assert refusal(STYLES[style], messages).field == "messages"
    else:
        assert ChatTemplate(STYLES[style], SPECIAL).render(messages) == expected


@pytest.mark.parametrize("style", STYLES)
def test_each_style_renders_at_least_three_conversations(style: str) -> None:
    rendered = [reference_render(STYLES[style], messages) for messages in CONVERSATIONS.values()]
    assert sum(text is not None for text in rendered) >= 3


@pytest.mark.parametrize("style", STYLES)
def test_every_prompt_renders_as_in_transformers(style: str) -> None:
    template = ChatTemplate(STYLES[style], SPECIAL)
    for prompt in short_prompts():
        messages = [{"role": "user", "content": prompt}]
        assert template.render(messages) == reference_render(STYLES[style], messages)


def test_a_refusal_of_the_template_reaches_the_client_in_its_words() -> None:
    error = refusal(MISTRAL, CONVERSATIONS["order"])
    assert "must take turns" in error.message
    assert error.field == "messages"


def test_text_in_a_message_is_never_run_as_a_template() -> None:
    text = ChatTemplate(GEMMA, SPECIAL).render([{"role": "user", "content": "{{ 7 * 7 }}{% if %}"}])
    assert "{{ 7 * 7 }}{% if %}" in text


def test_the_date_comes_from_the_clock_that_was_passed_in() -> None:
    template = ChatTemplate("{{ strftime_now('%d %b %Y') }}", {}, now=lambda: datetime(2031, 5, 4, tzinfo=UTC))
    assert template.render(CONVERSATIONS["one"]) == "04 May 2031"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ dict.__globals__['x'] }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{% set state = namespace(__class__=1) %}",
        "{% set state = namespace() %}{% set state._private = 1 %}",
        "{{ range(10000000) | length }}",
        "{{ 1 / 0 }}",
        "{{ messages[0].content + 1 }}",
        "{{ nothing.at.all }}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
    ],
)
def test_a_template_that_misbehaves_is_a_refused_request(source: str) -> None:
    refusal(source, CONVERSATIONS["one"])


def test_the_size_of_the_prompt_is_bounded_while_it_grows() -> None:
    endless = "{% for i in range(90000) %}{% for j in range(90000) %}{{ 'xxxxxxxxxx' }}{% endfor %}{% endfor %}"
    assert "more than 1000 characters" in refusal(endless, CONVERSATIONS["one"], max_chars=1000).message
    assert len(ChatTemplate("{{ 'x' * 1000 }}", {}, max_chars=1000).render(CONVERSATIONS["one"])) == 1000


def test_what_is_no_template_is_refused_at_load() -> None:
    with pytest.raises(ValueError, match="does not compile"):
        ChatTemplate("{% for %}", {})


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([], "messages"),
        ([{"role": "user"}], "messages[0]"),
        ([{"role": "user", "content": "a", "name": "b"}], "messages[0]"),
        ([{"role": "user", "content": "a"}, {"role": "user", "content": None}], "messages[1].content"),
        ([{"role": 7, "content": "a"}], "messages[0].role"),
        ([{"role": "user", "content": [{"type": "text", "text": "a"}]}], "messages[0].content"),
        ([{"role": "user", "content": "bad \ud800"}], "messages[0].content"),
        ([{"role": "\udfff", "content": "a"}], "messages[0].role"),
        ([{"role": "user", "content": "a"}] * 2049, "messages"),
    ],
)
def test_malformed_messages_are_refused_by_name(messages: Any, field: str) -> None:
    assert refusal(CHATML, messages).field == field


@pytest.mark.parametrize("text", ["", "\x00", "\ufffd \uffff", "e\u0301", "👩‍👩‍👧‍👦", "\u202eabc"])
def test_unusual_but_valid_text_is_accepted(text: str) -> None:
    assert check_text("prompt", text) == text


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb", None, 1, b"bytes", ["a"], "x" * 11])
def test_invalid_text_is_refused_by_name(text: object) -> None:
    with pytest.raises(KvferryError) as caught:
        check_text("prompt", text, max_chars=10)
    assert (caught.value.code, caught.value.field) == (ErrorCode.INVALID_REQUEST, "prompt")
