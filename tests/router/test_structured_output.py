"""From OpenAI's and vLLM's fields to the grammar that workers get."""

import json
from typing import Any

import pytest

from kvferry_rpc.common_pb2 import Grammar
from router.http.json_body import decode
from router.http.openai_requests import ChatBody, CompletionBody
from router.plans.generation_plan import ModelLimits, plan_chat, plan_completion
from runtime.errors import ErrorCode, KvferryError

LIMITS = ModelLimits("m", vocab_size=100, max_context_tokens=64)
SCHEMA = {"type": "object", "properties": {"b": {"type": "null"}, "a": {"type": "null"}}, "required": ["b"]}


def chat(**fields: Any) -> Grammar | None:
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "x"}], **fields}).encode()
    sampling = plan_chat(decode(body, ChatBody), LIMITS).sampling
    return sampling.grammar if sampling.HasField("grammar") else None


def completion(**fields: Any) -> Grammar | None:
    body = json.dumps({"model": "m", "prompt": "x", **fields}).encode()
    sampling = plan_completion(decode(body, CompletionBody), LIMITS).sampling
    return sampling.grammar if sampling.HasField("grammar") else None


def test_a_json_schema_keeps_the_order_of_its_properties() -> None:
    grammar = chat(
        response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": False}}
    )
    assert grammar is not None
    assert grammar.kind == Grammar.JSON_SCHEMA
    assert grammar.text == json.dumps(SCHEMA, separators=(",", ":"))
    assert grammar.field == "response_format.json_schema.schema"


def test_any_object_can_be_asked_for_in_both_ways() -> None:
    by_format = chat(response_format={"type": "json_object"})
    by_vendor_field = chat(structured_outputs={"json_object": True})
    assert by_format is not None
    assert by_vendor_field is not None
    assert (by_format.kind, by_format.text) == (by_vendor_field.kind, "") == (Grammar.JSON_OBJECT, "")


@pytest.mark.parametrize("fields", [{}, {"response_format": None}, {"response_format": {"type": "text"}}])
def test_without_a_format_any_text_will_do(fields: dict[str, Any]) -> None:
    assert chat(**fields) is None
    assert chat(**fields, structured_outputs=None) is None


@pytest.mark.parametrize("endpoint", [chat, completion])
def test_the_vendor_field_takes_each_kind_at_both_endpoints(endpoint: Any) -> None:
    kinds = {"json": SCHEMA, "json_object": True, "regex": "a+", "grammar": 'root ::= "a"'}
    got = [endpoint(structured_outputs={name: value}) for name, value in kinds.items()]
    assert [grammar.kind for grammar in got] == [
        Grammar.JSON_SCHEMA,
        Grammar.JSON_OBJECT,
        Grammar.REGEX,
        Grammar.EBNF,
    ]
    assert [grammar.field for grammar in got] == [f"structured_outputs.{name}" for name in kinds]
    assert got[2].text == "a+"


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"response_format": {"type": "wibble"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}},
            "response_format.json_schema.schema",
        ),
        ({"response_format": {"type": "json_object", "schema": {}}}, "response_format.schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "wibble"}}}},
            "response_format.json_schema.schema",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": [1]}}},
            "response_format.json_schema.schema",
        ),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "grammar": "b"}}, "structured_outputs"),
        ({"structured_outputs": {"choice": ["a"]}}, "structured_outputs.choice"),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a"}, "min_tokens": 1}, "min_tokens"),
        ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "ignore_eos"),
    ],
)
def test_each_bad_field_is_refused_by_name(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(KvferryError) as refused:
        chat(**fields)
    assert refused.value.code == ErrorCode.INVALID_REQUEST
    assert refused.value.field == field


@pytest.mark.parametrize("depth", [500, 10_000])
def test_a_deep_schema_in_a_body_is_a_refusal_and_no_crash(depth: int) -> None:
    deep = '{"items":' * depth + "{}" + "}" * depth
    body = '{"model":"m","messages":[{"role":"user","content":"x"}],"structured_outputs":{"json":' + deep + "}}"
    with pytest.raises(KvferryError) as refused:
        plan_chat(decode(body.encode(), ChatBody), LIMITS)
    assert refused.value.code == ErrorCode.INVALID_REQUEST
