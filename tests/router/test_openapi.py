"""The OpenAPI document: valid, complete, true. What it says is held against what the server does."""

import functools
import json
from typing import Any

import msgspec
import pytest
from schemathesis.core.failures import FailureGroup
from schemathesis.specs.openapi.definitions import OPENAPI_31_VALIDATOR
from starlette.routing import Route

from router.http.openapi import document
from router.http.openapi_bounds import RANGES
from router.http.openapi_paths import OPERATIONS
from tests.support.api_fuzz import ApiFuzz, validators_of_bodies
from tests.support.http_door import MODEL, Door, chat_body, completion_body, says
from tests.support.threaded_door import threaded_door
from tests.support.tool_templates import TOOLS, tool_door

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
# Files and data of the live page are no API.
PAGE = ("/ui", "/ui/state", "/ui/events", "/ui/{name}")
STEP = 0.01


def served() -> Any:
    return json.loads(document(needs_key=False, protect_metrics=False))


def reference_of(schema: Any) -> list[str]:
    """All references in it."""
    if isinstance(schema, dict):
        own = [schema["$ref"]] if isinstance(schema.get("$ref"), str) else []
        return own + [ref for value in schema.values() for ref in reference_of(value)]
    return [ref for value in schema for ref in reference_of(value)] if isinstance(schema, list) else []


def test_the_document_is_valid_and_every_reference_leads_somewhere() -> None:
    found = served()
    OPENAPI_31_VALIDATOR.validate(found)
    known = {f"#/components/schemas/{name}" for name in found["components"]["schemas"]}
    assert set(reference_of(found)) <= known
    names = [operation["operationId"] for path in found["paths"].values() for operation in path.values()]
    assert len(names) == len(set(names))


async def test_it_is_served_to_everybody() -> None:
    async with Door(says("x")).client() as client:
        answer = await client.get("/openapi.json")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/json"
    assert answer.json() == served()


async def test_every_route_of_the_server_is_in_it_and_no_other() -> None:
    routes = Door(says("x")).app._router.routes
    served_routes = set()
    for route in routes:
        assert isinstance(route, Route)
        methods = {method.lower() for method in route.methods or ()} - {"head"}
        served_routes |= {(route.path.replace(":path", ""), method) for method in methods if route.path not in PAGE}
    assert served_routes == {(operation.path, operation.method) for operation in OPERATIONS}


def test_keys_are_asked_for_where_the_server_asks() -> None:
    with_keys = json.loads(document(needs_key=True, protect_metrics=False))["paths"]
    anybody = {path for path, methods in with_keys.items() for it in methods.values() if {} in it["security"]}
    assert anybody == {"/health", "/ready", "/metrics", "/openapi.json"}
    protected = json.loads(document(needs_key=True, protect_metrics=True))["paths"]
    assert {} not in protected["/metrics"]["get"]["security"]


def test_every_field_of_every_body_is_in_it() -> None:
    components = served()["components"]["schemas"]
    bodies = [operation.body for operation in OPERATIONS if operation.body is not None]
    assert len(bodies) == 6
    for body in bodies:
        fields = msgspec.structs.fields(body)
        assert set(components[body.__name__]["properties"]) == {field.encode_name for field in fields}
        assert set(components[body.__name__]["required"]) == {field.encode_name for field in fields if field.required}
        assert components[body.__name__]["additionalProperties"] is False


def inside_and_outside(bounds: dict[str, float]) -> tuple[list[float], list[float]]:
    """Values at the bounds, and just beyond them."""
    inside, outside = [bounds["maximum"]], [bounds["maximum"] + STEP]
    if "minimum" in bounds:
        inside.append(bounds["minimum"])
        outside.append(bounds["minimum"] - STEP)
    else:
        inside.append(bounds["exclusiveMinimum"] + STEP)
        outside.append(bounds["exclusiveMinimum"])
    return inside, outside


@pytest.mark.parametrize("field", RANGES)
async def test_ranges_are_those_of_the_server(field: str) -> None:
    door = Door(says("x"))
    inside, outside = inside_and_outside(RANGES[field])
    for path, body in ((CHAT, chat_body), (COMPLETIONS, completion_body)):
        assert [(await door.post(path, body(**{field: value}))).status_code for value in inside] == [200, 200]
        assert [(await door.post(path, body(**{field: value}))).status_code for value in outside] == [400, 400]


@functools.cache
def body_validators() -> Any:
    return validators_of_bodies(served())


def chat_of(**message: Any) -> dict[str, Any]:
    return chat_body(messages=[message, {"role": "user", "content": "x"}])


CALL = {"id": "i", "type": "function", "function": {"name": "f", "arguments": "{}"}}
RESULT = {"role": "tool", "content": "x", "tool_call_id": "i", "name": "f"}
BODIES: list[tuple[str, dict[str, Any]]] = [
    *((CHAT, chat_body(stop=stop)) for stop in ("", "x", "x" * 257, ["x"] * 16, ["x"] * 17, [""])),
    *((CHAT, chat_body(logit_bias=bias)) for bias in ({"1": 100}, {"1": 100.5}, {"x": 1}, {"1": -101})),
    *((CHAT, chat_body(tools=tools)) for tools in (TOOLS, [], [{"type": "x"}], [{"type": "function"}])),
    (CHAT, chat_body(tools=[{"type": "function", "function": {"name": "a b"}}])),
    (CHAT, chat_body(tools=[{"type": "function", "function": {"name": "f", "parameters": None}}])),
    (CHAT, chat_body(tools=[{"type": "function", "function": {"name": "f", "parameters": {}}}])),
    (CHAT, chat_body(tools=[{"type": "function", "function": {"name": "f", "x": 1}}])),
    (CHAT, chat_of(role="system", content="x")),
    (CHAT, chat_of(role="user")),
    (CHAT, chat_of(role="user", content="x", tool_call_id="i")),
    (CHAT, chat_of(role="user", content="x", name="x")),
    (CHAT, chat_of(role="user", content="x", tool_calls=[CALL])),
    (CHAT, chat_of(role="user", content="x", reasoning_content="x")),
    (CHAT, chat_of(role="assistant", content="x", tool_calls=[])),
    (CHAT, chat_of(role="assistant", tool_calls=[CALL])),
    (CHAT, chat_of(role="assistant", tool_calls=[])),
    (CHAT, chat_of(role="assistant", content="x", reasoning_content="x")),
    (CHAT, chat_of(role="assistant", content="x", name="x")),
    (CHAT, chat_body(messages=[{"role": "assistant", "tool_calls": [CALL]}, RESULT])),
    (CHAT, chat_of(role="tool", content="x")),
    (CHAT, chat_of(role="tool", tool_call_id="i")),
    *((COMPLETIONS, completion_body(prompt=prompt)) for prompt in ([1], [[1]], ["x"], [], [[]], [1, "x"], ["x"] * 17)),
    *((COMPLETIONS, completion_body(prompt=prompt)) for prompt in (None, [-1], [[1], "x"], [None])),
    *(("/v1/responses", {"model": MODEL, "input": it}) for it in ("x", [], [{"role": "user", "content": "x"}], [{}])),
    ("/v1/responses", {"model": MODEL, "input": [{"type": "item_reference", "id": "x"}]}),
    ("/v1/responses", {"model": MODEL, "input": "x", "tools": [{"type": "function", "name": "f"}]}),
    ("/v1/responses", {"model": MODEL, "input": "x", "tools": [{"type": "function", "function": {"name": "f"}}]}),
]


@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_a_body_that_it_allows_is_taken_and_no_other(path: str, body: dict[str, Any]) -> None:
    answer = await tool_door(says("x"), "hermes").post(path, body)
    assert answer.status_code == (200 if body_validators()[path].is_valid(body) else 400), answer.text


def test_requests_made_from_it_get_answers_as_it_says() -> None:
    door = tool_door(says("A few words, and then some."), "hermes")
    with threaded_door(door) as address:
        fuzz = ApiFuzz(served(), address, MODEL)
        fuzz.run(100, seed_value=1)
    assert fuzz.statuses[CHAT, 200]
    assert not door.source.running


def test_a_wrong_answer_is_noticed() -> None:
    door = Door(says("x"), render_metrics=lambda: (b"up 1", "application/xml"))
    with threaded_door(door) as address, pytest.raises(FailureGroup, match="application/xml"):
        ApiFuzz(served(), address, MODEL).run(1, seed_value=1)
