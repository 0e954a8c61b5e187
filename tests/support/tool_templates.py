"""Small chat templates in the styles of the model families that call tools, and a door to a model with each."""

import functools
import json
from typing import Any

import tokenizers

from router.plans.generation_plan import ModelLimits
from router.text.chat_format import ChatFormat, chat_format
from router.text.chat_template import ChatTemplate
from router.text.tokenizer import AsyncTokenizer, Tokenizer
from tests.support.http_door import CONTEXT, MODEL, MODEL_DIR, Door
from tests.support.scripted_source import Script

HERMES = """\
{%- if tools %}
{{- '<|im_start|>system\\nCall with <tool_call>{"name": ..., "arguments": ...}</tool_call>. Tools:' }}
{%- for tool in tools %}{{- '\\n' ~ (tool | tojson) }}{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>' ~ message.content ~ '</tool_response><|im_end|>\\n' }}
{%- elif message.tool_calls %}
{{- '<|im_start|>assistant\\n' ~ (message.content or '') }}
{%- for call in message.tool_calls %}
{{- '\\n<tool_call>{"name": "' ~ call.function.name ~ '", "arguments": ' }}
{{- call.function.arguments | tojson }}{{- '}</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- else %}
{%- if message.reasoning_content %}{{- '<think>' ~ message.reasoning_content ~ '</think>' }}{%- endif %}
{{- '<|im_start|>' ~ message.role ~ '\\n' ~ message.content ~ '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
LLAMA3 = """\
{{- bos_token }}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- if tools is not none %}
{{- 'Answer with {"name": ..., "parameters": ...}, after <|python_tag|> if you like. Functions: ' }}
{%- for tool in tools %}{{- (tool | tojson(indent=2)) ~ '\\n' }}{%- endfor %}
{%- endif %}
{%- for message in messages %}
{%- if 'tool_calls' in message %}
{%- if message.tool_calls | length != 1 %}{{- raise_exception('One call at a time.') }}{%- endif %}
{%- set call = message.tool_calls[0].function %}
{{- '<|header|>assistant\\n{"name": "' ~ call.name ~ '", "parameters": ' ~ (call.arguments | tojson) ~ '}' }}
{%- elif message.role == 'tool' %}
{{- '<|header|>ipython\\n' ~ (message.content | tojson) }}
{%- else %}
{{- '<|header|>' ~ message.role ~ '\\n' ~ (message.content | trim) }}
{%- endif %}
{{- eos_token }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|header|>assistant\\n' }}{%- endif %}
"""
MISTRAL = """\
{{- bos_token }}
{%- for message in messages %}
{%- if message.role == 'user' %}
{%- if tools is not none and loop.last %}
{{- '[AVAILABLE_TOOLS] ' ~ (tools | tojson) ~ '[/AVAILABLE_TOOLS]' }}
{%- endif %}
{{- '[INST] ' ~ message.content ~ '[/INST]' }}
{%- elif message.role == 'tool' %}
{%- if message.tool_call_id | length != 9 %}{{- raise_exception('Ids have nine characters.') }}{%- endif %}
{{- '[TOOL_RESULTS] {"content": ' ~ (message.content | tojson) ~ ', "call_id": "' ~ message.tool_call_id ~ '"}' }}
{%- elif message.tool_calls is defined and message.tool_calls is not none %}
{{- '[TOOL_CALLS] [' }}
{%- for call in message.tool_calls %}
{{- (call.function | tojson)[:-1] ~ ', "id": "' ~ call.id ~ '"}' ~ (']' if loop.last else ', ') }}
{%- endfor %}
{{- eos_token }}
{%- else %}
{{- ' ' ~ message.content ~ eos_token }}
{%- endif %}
{%- endfor %}
"""
TEMPLATES = {"hermes": HERMES, "llama3": LLAMA3, "mistral": MISTRAL}
SPECIAL = {"bos_token": "<|bos|>", "eos_token": "<|end|>"}

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer", "minimum": 1}},
            "required": ["city"],
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
TOOLS = [WEATHER, CLOCK]


def written(style: str, calls: list[tuple[str, dict[str, Any]]]) -> str:
    """How a model of this style writes calls of these names and arguments."""
    if style == "hermes":
        return "\n".join(
            f'<tool_call>\n{{"name": "{n}", "arguments": {json.dumps(a)}}}\n</tool_call>' for n, a in calls
        )
    if style == "llama3":
        return "; ".join(f'{{"name": "{n}", "parameters": {json.dumps(a)}}}' for n, a in calls)
    if style == "mistral":
        return "[TOOL_CALLS] " + json.dumps([{"name": n, "arguments": a} for n, a in calls])
    if style == "mistral-args":
        return "".join(f"[TOOL_CALLS]{n}[ARGS]{json.dumps(a)}" for n, a in calls)
    return json.dumps([{"name": n, "arguments": a} for n, a in calls])


@functools.cache
def tokenizer_of(style: str, *markers: str, think: bool = False) -> Tokenizer:
    """The test model's tokenizer with another template, and more special tokens. `think`: the prompt ends in a block
    that the template opened."""
    backend = tokenizers.Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))
    backend.add_special_tokens([tokenizers.AddedToken(marker, special=True, normalized=False) for marker in markers])
    source = TEMPLATES[style] + ("{{- '<think>\\n' }}" if think else "")
    return Tokenizer(backend, chat_template=ChatTemplate(source, SPECIAL))


def tool_door(script: Script, style: str = "hermes", *markers: str, think: bool = False, **changes: Any) -> Door:
    """A door to a model of this style."""
    tokenizer = tokenizer_of(style, *markers, think=think)
    known: ChatFormat = changes.pop("chat", None) or chat_format("auto", "auto", tokenizer.chat_template_source)
    limits = ModelLimits(MODEL, tokenizer.vocab_size, 4 * CONTEXT, known)
    return Door(script, tokenizer=AsyncTokenizer(tokenizer), limits=lambda: limits, **changes)
