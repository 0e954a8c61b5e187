"""Chat templates: from messages to the prompt text, exactly as transformers renders it.

A template is a program that came with the model. It runs in Jinja's immutable sandbox: it can read the messages and
nothing else. Clients choose messages and tools, never options of the template.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, meta, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from router.text.tools import call_for_template
from runtime.errors import KvferryError, invalid
from runtime.limits import MAX_MESSAGES, MAX_PROMPT_CHARS

_MESSAGE_KEYS = frozenset({"role", "content"})
_MORE_KEYS = {"assistant": frozenset({"tool_calls", "reasoning_content"}), "tool": frozenset({"tool_call_id", "name"})}


class ChatTemplate:
    """A compiled template. Immutable after construction: any number of threads may render at once."""

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        *,
        max_chars: int = MAX_PROMPT_CHARS,
        now: Callable[[], datetime] = lambda: datetime.now().astimezone(),
    ) -> None:
        """`special_tokens` are variables of the template, such as `bos_token`. `now` serves templates that write the
        date. Raises ValueError when `source` is not a template."""
        environment = _environment(now)
        try:
            self._template = environment.from_string(source)
            variables = meta.find_undeclared_variables(environment.parse(source))
        except TemplateError as error:
            raise ValueError(f"the chat template does not compile: {error}") from error
        self.source = source
        self._takes_tools = "tools" in variables
        self._variables = dict(special_tokens)
        self._max_chars = max_chars

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """The prompt for `messages` and `tools` with the header of the answer at its end.

        A message has a role and a content; of the assistant perhaps `tool_calls` (OpenAI's: the arguments are JSON
        text) and `reasoning_content`, of a tool `tool_call_id` and perhaps `name`. `tools` passed `tool_use`.

        CPU work, milliseconds for long conversations: keep it off the event loop. Raises KvferryError
        (INVALID_REQUEST) naming the field for malformed messages, for those that the template refuses, for tools and
        calls that it has no place for, and when the text would exceed `max_chars`.
        """
        plain = _checked(messages)
        self._check_place(plain, tools)
        pieces: list[str] = []
        size = 0
        try:
            for piece in self._template.generate(
                messages=plain, tools=list(tools) or None, documents=None, add_generation_prompt=True, **self._variables
            ):
                pieces.append(piece)
                size += len(piece)
                if size > self._max_chars:
                    raise invalid("messages", f"become a prompt of more than {self._max_chars} characters")
        except KvferryError:
            raise
        except Exception as error:  # Template code fails in every way Python code can; Jinja says to catch them all.
            raise invalid("messages", f"are refused by the model's chat template: {error}") from error
        # Escapes in the JSON of calls can stand for half a character.
        return check_text("messages", "".join(pieces), max_chars=self._max_chars)

    def _check_place(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> None:
        """Refuse what the template would drop in silence."""
        if tools and not self._takes_tools:
            raise invalid("tools", "cannot be used: this model's chat template has no place for them")
        for index, message in enumerate(messages):
            if message.get("tool_calls") and "tool_calls" not in self.source:
                field = f"messages[{index}].tool_calls"
                raise invalid(field, "cannot be used: this model's chat template has no place for them")
            if message["role"] == "tool" and "tool" not in self.source:
                field = f"messages[{index}].role"
                raise invalid(field, "cannot be tool: this model's chat template has no place for it")


def check_text(field: str, text: object, *, max_chars: int = MAX_PROMPT_CHARS) -> str:
    """`text` if it is a string that a tokenizer can read.

    Raises KvferryError (INVALID_REQUEST) naming `field` for other types, more than `max_chars` characters, and lone
    surrogates, which JSON can carry but UTF-8 cannot.
    """
    if not isinstance(text, str):
        raise invalid(field, "must be a string")
    if len(text) > max_chars:
        raise invalid(field, f"has {len(text)} characters, more than the limit of {max_chars}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise invalid(field, f"is not valid Unicode text: lone surrogate at character {error.start}") from None
    return text


def _checked(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    if not messages:
        raise invalid("messages", "must not be empty")
    if len(messages) > MAX_MESSAGES:
        raise invalid("messages", f"has {len(messages)} entries, more than the limit of {MAX_MESSAGES}")
    return [_checked_message(f"messages[{index}]", message) for index, message in enumerate(messages)]


def _checked_message(field: str, message: Mapping[str, Any]) -> dict[str, Any]:
    more = message.keys() - _MESSAGE_KEYS
    if not message.keys() >= _MESSAGE_KEYS:
        raise invalid(field, "must have a role and a content, and nothing else")
    role = check_text(f"{field}.role", message["role"])
    if more - _MORE_KEYS.get(role, frozenset()):
        raise invalid(field, "must have a role and a content, and nothing else")
    plain: dict[str, Any] = {"role": role, "content": check_text(f"{field}.content", message["content"])}
    for key in ("name", "tool_call_id", "reasoning_content"):
        if key in more:
            plain[key] = check_text(f"{field}.{key}", message[key])
    if "tool_calls" in more:
        calls = enumerate(message["tool_calls"])
        plain["tool_calls"] = [call_for_template(f"{field}.tool_calls[{index}]", call) for index, call in calls]
    return plain


def _environment(now: Callable[[], datetime]) -> ImmutableSandboxedEnvironment:
    """The environment that chat templates are written for; every setting here changes what they render."""

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def strftime_now(pattern: str) -> str:
        return now().strftime(pattern)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    environment.globals["dict"] = _new_dict
    environment.globals["namespace"] = _PlainNamespace
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON. Jinja's own filter escapes HTML characters, which a model was not trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _new_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    """`dict` as a function, so that a template cannot reach the attributes of the class."""
    return dict(*args, **kwargs)


class _PlainNamespace(Namespace):
    """Jinja's namespace without attributes that begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # like Jinja's, so that `self` is free for the template
        self, values = args[0], dict(*args[1:], **kwargs)
        for name in values:
            _refuse_private(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


def _refuse_private(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace cannot hold the private name {name!r}")


class _GenerationBlock(Extension):
    """`{% generation %}`: marks the assistant's own words for training; here its body is just rendered."""

    tags = {"generation"}  # noqa: RUF012 - the type Jinja declares

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)
