"""Tools at the door: what is taken, what is refused by name, and the grammar of a call that is forced."""

import json
from typing import Any

import jsonschema
import pytest

from kvferry_rpc.common_pb2 import ErrorCode
from router.text.chat_format import ChatFormat
from router.text.tools import ToolMode, ToolUse, call_for_template, chat_syntax, forced_grammar, tool_use
from runtime.errors import KvferryError
from runtime.grammar_limits import check_grammar
from runtime.json_schema import rebased
from runtime.limits import MAX_TOOLS
from tests.support.tool_templates import CLOCK, TOOLS, WEATHER

KNOWN = ChatFormat(tools="hermes", reasoning=True)


def use(tools: Any = TOOLS, mode: ToolMode | None = None, only: str | None = None, parallel: bool = True) -> ToolUse:
    return tool_use(tools, mode, only, parallel=parallel)


def refused(tools: Any = TOOLS, mode: ToolMode | None = None, only: str | None = None) -> KvferryError:
    with pytest.raises(KvferryError) as caught:
        tool_use(tools, mode, only, parallel=True)
    assert caught.value.code == ErrorCode.INVALID_REQUEST
    return caught.value


def function(**fields: Any) -> list[Any]:
    return [{"type": "function", "function": {"name": "f", **fields}}]


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def test_tools_reach_the_template_as_they_came_without_nulls() -> None:
    sent = [WEATHER, {"type": "function", "function": {"name": "clock", "description": None, "strict": True}}]
    assert use(sent).tools == (WEATHER, {"type": "function", "function": {"name": "clock", "strict": True}})
    assert json.dumps(use().tools[0]) == json.dumps(WEATHER)


@pytest.mark.parametrize(
    ("tools", "field"),
    [
        ([{"type": "wibble"}], "tools[0].type"),
        ([WEATHER, {}], "tools[1].type"),
        ([5], "tools[0]"),
        ([{"type": "function"}], "tools[0].function"),
        ([{"type": "function", "function": "f"}], "tools[0].function"),
        ([{**CLOCK, "more": 1}], "tools[0].more"),
        (function(name=None), "tools[0].function.name"),
        (function(name="has space"), "tools[0].function.name"),
        (function(name="f\n"), "tools[0].function.name"),
        (function(name="x" * 65), "tools[0].function.name"),
        (function(description=["d"]), "tools[0].function.description"),
        (function(strict="yes"), "tools[0].function.strict"),
        (function(parameters="{}"), "tools[0].function.parameters"),
        (function(parameters=[]), "tools[0].function.parameters"),
        (function(parameters={}), "tools[0].function.parameters"),
        (function(parameters={"type": "string"}), "tools[0].function.parameters"),
        (function(parameters={"type": "object", "maximum": float("nan")}), "tools[0]"),
        (function(parameters={"type": "object", "maximum": 10**5000}), "tools[0]"),
        (function(parameters=nested(40)), "tools[0]"),
        (function(parameters=nested(10_000)), "tools[0]"),
        (function(description="x" * 300_000), "tools"),
        (function(description="\ud800"), "tools[0]"),
        (function(wibble=1), "tools[0].function.wibble"),
        ([CLOCK, CLOCK], "tools[1].function.name"),
        ([CLOCK] * (MAX_TOOLS + 1), "tools"),
    ],
)
def test_a_malformed_tool_is_refused_by_name(tools: Any, field: str) -> None:
    assert refused(tools).field == field


def test_all_tools_together_are_bounded() -> None:
    large = [{"type": "function", "function": {"name": f"f{i}", "description": "x" * 60_000}} for i in range(5)]
    assert refused(large).field == "tools"


def test_the_choice_needs_tools_and_a_name_among_them() -> None:
    assert use([]) == use([], ToolMode.NONE) == use(TOOLS, ToolMode.NONE) == ToolUse()
    for mode, only in ((ToolMode.AUTO, None), (ToolMode.REQUIRED, None), (None, "clock")):
        assert refused([], mode, only).field == "tool_choice"
    assert refused(TOOLS, None, "nobody").field == "tool_choice"
    assert use().mode is ToolMode.AUTO
    assert use(only="clock").names == {"clock"}
    assert use().names == {"get_weather", "clock"}


def test_the_syntax_follows_from_the_choice() -> None:
    assert chat_syntax(use(), KNOWN, has_grammar=False).reasoning
    assert chat_syntax(use(parallel=False), KNOWN, has_grammar=False).single
    forced = chat_syntax(use(mode=ToolMode.REQUIRED, parallel=False), KNOWN, has_grammar=True)
    assert (forced.forced, forced.single, forced.reasoning) == (True, False, False)
    without = chat_syntax(use(mode=ToolMode.NONE), KNOWN, has_grammar=True)
    assert (without.tools, without.reasoning) == (None, False)
    with pytest.raises(KvferryError) as caught:
        chat_syntax(use(), ChatFormat(), has_grammar=False)
    assert caught.value.field == "tools"
    assert chat_syntax(use(mode=ToolMode.NONE), ChatFormat(), has_grammar=False).tools is None


def schema_of(tools: Any, only: str | None = None, parallel: bool = True) -> Any:
    grammar = forced_grammar(use(tools, None if only else ToolMode.REQUIRED, only, parallel))
    assert grammar is not None
    check_grammar(grammar)
    return json.loads(grammar.text)


def fits(schema: Any, *calls: Any) -> bool:
    return bool(jsonschema.Draft202012Validator(schema).is_valid(list(calls)))


def test_a_forced_answer_is_an_array_of_calls() -> None:
    schema = schema_of(TOOLS)
    oslo = {"name": "get_weather", "arguments": {"city": "Oslo"}}
    assert fits(schema, oslo)
    assert fits(schema, {"name": "clock", "arguments": {}}, oslo)
    assert not fits(schema)
    assert not fits(schema, {"name": "nobody", "arguments": {}})
    assert not fits(schema, {"name": "get_weather", "arguments": {}})
    assert not fits(schema, {"name": "clock", "arguments": {"city": "Oslo"}})
    assert not fits(schema_of(TOOLS, parallel=False), oslo, oslo)
    assert not fits(schema_of(TOOLS, "clock"), oslo)
    assert fits(schema_of(TOOLS, "get_weather"), oslo)
    assert forced_grammar(use()) is None


TREE = {
    "type": "object",
    "properties": {
        "root": {"$ref": "#/$defs/node"},
        "const": {"enum": ["$ref"]},
    },
    "required": ["root"],
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"left": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
        }
    },
}


def test_references_in_the_schema_of_a_tool_still_lead_where_they_led() -> None:
    schema = schema_of([CLOCK, {"type": "function", "function": {"name": "grow", "parameters": TREE}}])
    good = {"name": "grow", "arguments": {"root": {"left": {"left": None}}}}
    assert fits(schema, good)
    assert not fits(schema, {"name": "grow", "arguments": {"root": {"left": 5}}})
    moved = rebased({"const": {"$ref": "#/a"}, "properties": {"$ref": {"$ref": "#/$defs/x"}}}, "#/items")
    assert moved == {"const": {"$ref": "#/a"}, "properties": {"$ref": {"$ref": "#/items/$defs/x"}}}
    assert rebased(True, "#/items") is True


@pytest.mark.parametrize(
    "parameters",
    [
        {"type": "object", "not": {}},
        {"type": "object", "properties": {"a": {"$ref": "#/$defs/b"}}},
        {"type": "object", "if": {}},
    ],
)
def test_a_schema_that_cannot_be_enforced_is_refused_only_where_a_call_is_forced(parameters: Any) -> None:
    tools = [CLOCK, *function(parameters=parameters)]
    assert use(tools).names == {"clock", "f"}
    with pytest.raises(KvferryError) as caught:
        forced_grammar(use(tools, ToolMode.REQUIRED))
    assert caught.value.field == "tools[1].function.parameters"
    assert forced_grammar(use(tools, None, "clock")) is not None


def test_arguments_of_earlier_calls_become_objects() -> None:
    def call(arguments: str) -> dict[str, Any]:
        return call_for_template("c", {"id": "i", "function": {"name": "f", "arguments": arguments}})

    assert call('{"a": {"b": [1, "é"]}}')["function"] == {"name": "f", "arguments": {"a": {"b": [1, "é"]}}}
    assert call(" ")["function"]["arguments"] == {}
    for wrong in ("[]", "1", '"{}"', "{", '{"a": NaN}', '{"a": ' * 100 + "1" + "}" * 100, "[" * 100_000):
        with pytest.raises(KvferryError) as caught:
            call(wrong)
        assert caught.value.field == "c.function.arguments"


@pytest.fixture(scope="module")
def compiler() -> Any:
    """The workers' compiler for the test model's vocabulary."""
    pytest.importorskip("xgrammar")
    from engine.grammar_backend import GrammarBackend
    from engine.vocabulary import read_vocabulary
    from tests.support.http_door import MODEL_DIR, tokenizer

    return GrammarBackend(
        read_vocabulary(
            MODEL_DIR / "tokenizer.json",
            MODEL_DIR / "tokenizer_config.json",
            vocab_size=tokenizer().vocab_size,
            eos_token_ids=tokenizer().eos_token_ids,
        )
    )


@pytest.mark.parametrize(
    ("text", "complete"),
    [
        ('[{"name": "clock", "arguments": {}}]', True),
        ('[{"name":"grow","arguments":{"root":{"left":null}}},{"name":"clock","arguments":{}}]', True),
        ('[{"name": "clock", "arguments": {}}', False),
        ("[]", False),
        ('<tool_call>{"name": "clock"', False),
    ],
)
def test_the_workers_compiler_enforces_the_grammar_of_a_forced_call(compiler: Any, text: str, complete: bool) -> None:
    tools = [WEATHER, CLOCK, {"type": "function", "function": {"name": "grow", "parameters": TREE}}]
    grammar = forced_grammar(use(tools, ToolMode.REQUIRED))
    assert grammar is not None
    matcher = compiler.matcher(compiler.compile(grammar))
    assert (matcher.accept_string(text) and matcher.is_completed()) is complete
