"""What a door refuses of a grammar, without a compiler and in no time."""

import json
from typing import Any

import pytest

from kvferry_rpc.common_pb2 import Grammar, SamplingParams
from runtime.errors import ErrorCode, KvferryError
from runtime.grammar_limits import check_grammar, schema_text
from runtime.limits import check_sampling
from tests.support.json_schemas import FLAG, NOTHING, SCHEMAS, SMALL, WORD, obj


def refusal(text: str, kind: "Grammar.Kind.ValueType" = Grammar.JSON_SCHEMA, field: str = "") -> str:
    with pytest.raises(KvferryError) as refused:
        check_grammar(Grammar(kind=kind, text=text, field=field))
    assert refused.value.code == ErrorCode.INVALID_REQUEST
    assert refused.value.field == (field or "grammar")
    return refused.value.message


def test_good_schemas_pass() -> None:
    for schema in SCHEMAS:
        check_grammar(Grammar(kind=Grammar.JSON_SCHEMA, text=json.dumps(schema)))


def test_other_kinds_pass() -> None:
    check_grammar(Grammar(kind=Grammar.JSON_OBJECT))
    check_grammar(Grammar(kind=Grammar.REGEX, text="(" * 64 + "a" + ")" * 64))
    check_grammar(Grammar(kind=Grammar.EBNF, text='root ::= "a"'))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[" * 60_000, "deeper"),
        ('{"items":' * 7_000, "deeper"),
        ('{"type":"array","items":' * 64 + "{}" + "}" * 64, "deeper"),
        ('{"title":"' + "x" * 70_000 + '"}', "longer than 65536 bytes"),
        ('{"title":"' + "é" * 40_000 + '"}', "longer than 65536 bytes"),
        ('{"const":NaN}', "not a JSON number"),
        ('{"const":' + "9" * 5_000 + "}", "not valid JSON"),
        ("{", "not valid JSON"),
        ("", "not valid JSON"),
        ("\0", "NUL"),
    ],
)
def test_a_schema_is_text_of_bounded_length_and_depth(text: str, reason: str) -> None:
    assert reason in refusal(text)


UNENFORCEABLE: list[tuple[Any, str]] = [
    (3, "must be an object or a boolean"),
    ({"type": "wibble"}, "type must be"),
    ({"type": []}, "type must be"),
    ({"type": {}}, "type must be"),
    ({"not": NOTHING}, "'not' is not supported"),
    ({"type": "integer", "nullable": True}, "'nullable' is not supported"),
    ({"if": SMALL, "then": SMALL}, "not supported"),
    ({"type": "object", "dependentRequired": {"a": ["b"]}}, "not supported"),
    ({"type": "array", "contains": SMALL}, "not supported"),
    ({"type": "array", "items": SMALL, "uniqueItems": True}, "uniqueItems"),
    ({"type": "number", "multipleOf": 0.5}, "multipleOf"),
    ({"type": ["integer", "number"], "multipleOf": 2}, "multipleOf"),
    ({"minLength": 3}, "needs a type"),
    ({"type": "string", "minimum": 3}, "needs a type"),
    ({"properties": {}, "items": FLAG}, "type must be given"),
    ({"type": "string", "pattern": "a", "maxLength": 3}, "cannot be combined"),
    ({"type": "string", "format": "date", "maxLength": 3}, "cannot be combined"),
    ({"type": "string", "format": "wibble"}, "format must be"),
    ({"type": "string", "format": {}}, "format must be"),
    ({"anyOf": [FLAG], "type": "boolean"}, "cannot be combined"),
    ({"anyOf": []}, "not empty"),
    ({"anyOf": 3}, "not empty"),
    ({"allOf": [SMALL, SMALL]}, "more than one"),
    ({"oneOf": [SMALL, {"type": "number"}]}, "oneOf needs"),
    ({"oneOf": [True, SMALL]}, "oneOf needs"),
    ({"oneOf": [obj({"a": {"const": "x"}}), obj({"a": {"const": "x"}, "b": FLAG})]}, "oneOf needs"),
    ({"oneOf": [obj({"a": {"const": "x"}}), {"type": "object", "properties": {"a": {"const": "y"}}}]}, "oneOf needs"),
    ({"enum": []}, "not empty"),
    ({"enum": 3}, "not empty"),
    ({"type": "integer", "enum": [1, "a"]}, "not of the type"),
    ({"type": "integer", "enum": [True]}, "not of the type"),
    ({"const": 3, "minimum": 7}, "cannot be combined"),
    ({"$ref": "#/$defs/x"}, "$ref"),
    ({"$ref": 3}, "$ref"),
    ({"$ref": "https://example.org/x"}, "$ref"),
    ({"default": SMALL, "anyOf": [{"$ref": "#/default"}, FLAG]}, "$ref"),
    ({"$defs": {"x": SMALL}, "$ref": "#/$defs/x", "minimum": 3}, "cannot be combined"),
    ({"type": "object", "required": ["a"]}, "properties does not describe"),
    ({"type": "object", "properties": 3}, "must be an object"),
    ({"type": "object", "patternProperties": 3}, "must be an object"),
    ({"type": "object", "patternProperties": {"a": FLAG, "b": FLAG}}, "more than one pattern"),
    ({"type": "object", "patternProperties": {"a": FLAG}, "properties": {"b": FLAG}}, "cannot be combined"),
    ({"type": "object", "patternProperties": {"a": FLAG}, "additionalProperties": FLAG}, "cannot be combined"),
    ({"type": "object", "additionalProperties": FLAG, "minProperties": 2}, "cannot be combined"),
    ({"type": "object", "propertyNames": WORD, "properties": {"b": FLAG}}, "cannot be combined"),
    ({"enum": list(range(1001))}, "1000 values"),
    ({"anyOf": [FLAG] * 2000}, "2000 schemas"),
    ({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "type": "null"}, "to an end"),
]


@pytest.mark.parametrize(("schema", "reason"), UNENFORCEABLE)
def test_what_would_not_be_enforced_is_refused_wherever_it_stands(schema: Any, reason: str) -> None:
    assert reason in refusal(json.dumps(schema))
    inside = {"type": "array", "items": {"anyOf": [schema, NOTHING]}}
    message = refusal(json.dumps(inside), field="the.field")
    assert message.startswith("the.field ")
    if reason[0] != "$" and "schemas" not in reason and "values" not in reason:
        assert "#/items/anyOf/0" in message


TO_ITSELF = {"$ref": "#"}


@pytest.mark.parametrize(
    ("schema", "ends"),
    [
        (TO_ITSELF, False),
        (obj({"a": TO_ITSELF}), False),
        ({"properties": {"a": TO_ITSELF}, "required": ["a"]}, False),
        ({"type": "object", "properties": {"a": TO_ITSELF}}, True),
        ({"type": ["object", "null"], "properties": {"a": TO_ITSELF}, "required": ["a"]}, True),
        ({"type": "array", "items": TO_ITSELF}, True),
        ({"type": "array", "items": TO_ITSELF, "minItems": 1}, False),
        ({"type": "array", "prefixItems": [NOTHING, TO_ITSELF], "minItems": 1}, True),
        ({"type": "array", "prefixItems": [NOTHING, TO_ITSELF], "minItems": 2}, False),
        ({"anyOf": [TO_ITSELF, NOTHING]}, True),
        ({"anyOf": [TO_ITSELF, obj({"a/b": TO_ITSELF})]}, False),
        ({"allOf": [obj({"a": {"anyOf": [TO_ITSELF, FLAG]}})]}, True),
        ({"allOf": [obj({"a": TO_ITSELF})]}, False),
    ],
)
def test_a_recursive_schema_needs_a_value_that_ends(schema: dict[str, Any], ends: bool) -> None:
    text = json.dumps(schema)
    if ends:
        check_grammar(Grammar(kind=Grammar.JSON_SCHEMA, text=text))
    else:
        assert "without a way to an end" in refusal(text)


@pytest.mark.parametrize(
    ("kind", "text", "reason"),
    [
        (Grammar.KIND_UNSPECIFIED, "x", "no kind"),
        (Grammar.JSON_OBJECT, "{}", "no text"),
        (Grammar.REGEX, "", "empty"),
        (Grammar.EBNF, " ", "empty"),
        (Grammar.REGEX, "a" * 4097, "longer than 4096"),
        (Grammar.EBNF, "a" * 65537, "longer than 65536"),
        (Grammar.REGEX, "(" * 65, "nested"),
        (Grammar.EBNF, "root ::= " + "(" * 100, "nested"),
        (Grammar.EBNF, 'root ::= "\0"', "NUL"),
    ],
)
def test_other_grammars_are_bounded_too(kind: "Grammar.Kind.ValueType", text: str, reason: str) -> None:
    assert reason in refusal(text, kind)


def test_a_field_name_that_is_too_long_is_not_repeated() -> None:
    with pytest.raises(KvferryError) as refused:
        check_grammar(Grammar(kind=Grammar.REGEX, field="x" * 65))
    assert refused.value.field == "grammar"


def test_a_schema_becomes_text_or_is_refused_before_much_work() -> None:
    assert schema_text("f", {"b": [1, "é"], "a": None}) == '{"b":[1,"é"],"a":null}'
    for document in ({"a": "x" * 70_000}, dict.fromkeys(map(str, range(30_000))), {"a": "\ud800"}):
        with pytest.raises(KvferryError):
            schema_text("f", document)
    deep: Any = {}
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(KvferryError, match="deeper"):
        schema_text("f", deep)
    while deep:
        deep = deep.pop()  # a destructor would recurse


@pytest.mark.parametrize("change", [{"min_tokens": 1}, {"ignore_eos": True}])
def test_what_could_leave_no_token_possible_is_refused_beside_a_grammar(change: dict[str, Any]) -> None:
    params = SamplingParams(max_tokens=4, grammar=Grammar(kind=Grammar.JSON_OBJECT))
    check_sampling(params, vocab_size=10, max_context_tokens=10)
    for field, value in change.items():
        setattr(params, field, value)
    with pytest.raises(KvferryError) as refused:
        check_sampling(params, vocab_size=10, max_context_tokens=10)
    assert refused.value.field in change


def test_a_bad_grammar_is_refused_with_the_other_parameters() -> None:
    params = SamplingParams(max_tokens=4, grammar=Grammar(kind=Grammar.REGEX, field="structured_outputs.regex"))
    with pytest.raises(KvferryError) as refused:
        check_sampling(params, vocab_size=10, max_context_tokens=10)
    assert refused.value.field == "structured_outputs.regex"
