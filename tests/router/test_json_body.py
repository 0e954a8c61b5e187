"""Bytes from a client: bounded, decoded strictly, refused with the field's name."""

import asyncio
import json
from typing import Any

import pytest
from starlette.datastructures import Headers

from router.http import json_body
from router.http.asgi import Receive
from router.http.errors import ClientGone, HttpError
from router.http.json_body import BodyReader, decode, decode_body
from router.http.openai_requests import ChatBody, TokenizeBody
from runtime.errors import KvferryError
from runtime.limits import MAX_BODY_BYTES
from tests.support.http_door import MODEL, Door, says

JSON = Headers({"content-type": "application/json"})


def receiver(*messages: dict[str, Any]) -> Receive:
    queue = list(messages)

    async def receive() -> dict[str, Any]:
        return queue.pop(0)

    return receive


def piece(data: bytes, more: bool = False) -> dict[str, Any]:
    return {"type": "http.request", "body": data, "more_body": more}


def refusal(body: bytes) -> KvferryError:
    with pytest.raises(KvferryError) as caught:
        decode(body, TokenizeBody)
    assert caught.value.http_status == 400
    return caught.value


async def test_a_body_in_pieces_is_put_together() -> None:
    assert await BodyReader().read(JSON, receiver(piece(b"{", True), piece(b""), piece(b"}"))) == b"{"
    assert await BodyReader().read(JSON, receiver(piece(b"{", True), piece(b"}"))) == b"{}"


async def test_a_declared_length_beyond_the_bound_is_refused_before_reading() -> None:
    headers = Headers({"content-type": "application/json", "content-length": str(MAX_BODY_BYTES + 1)})
    with pytest.raises(HttpError) as caught:
        await BodyReader().read(headers, receiver())
    assert caught.value.status == 413


async def test_an_undeclared_length_is_counted() -> None:
    reader = BodyReader(max_bytes=10)
    with pytest.raises(HttpError) as caught:
        await reader.read(JSON, receiver(piece(b"x" * 6, True), piece(b"x" * 6, True)))
    assert caught.value.status == 413
    assert await reader.read(JSON, receiver(piece(b"x" * 10))) == b"x" * 10


async def test_bodies_held_at_once_have_one_bound_and_free_it_in_any_case(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_body, "MAX_BUFFERED_BYTES", 10)
    reader = BodyReader()
    with pytest.raises(HttpError) as caught:
        await reader.read(JSON, receiver(piece(b"x" * 11)))
    assert (caught.value.status, caught.value.headers["retry-after"]) == (429, "1")
    with pytest.raises(ClientGone):
        await reader.read(JSON, receiver(piece(b"x" * 9, True), {"type": "http.disconnect"}))
    assert await reader.read(JSON, receiver(piece(b"x" * 10))) == b"x" * 10


async def test_a_body_that_does_not_arrive_ends_in_a_timeout() -> None:
    async def silence() -> dict[str, Any]:
        await asyncio.Event().wait()
        return {}

    with pytest.raises(HttpError) as caught:
        await BodyReader(timeout_s=0.01).read(JSON, silence)
    assert caught.value.status == 408


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"content-type": "text/plain"},
        {"content-type": "multipart/form-data; boundary=x"},
        {"content-type": "application/json; charset=utf-16"},
        {"content-type": "application/json", "content-encoding": "zstd"},
        {"content-type": "application/json", "content-encoding": "br"},
        {"content-type": "application/json", "content-encoding": "gzip, gzip"},
    ],
)
async def test_other_content_types_are_refused(headers: dict[str, str]) -> None:
    with pytest.raises(HttpError) as caught:
        await BodyReader().read(Headers(headers), receiver(piece(b"{}")))
    assert caught.value.status == 415


async def test_json_with_a_stated_charset_is_taken() -> None:
    headers = Headers({"content-type": "Application/JSON; charset=UTF-8"})
    assert await BodyReader().read(headers, receiver(piece(b"{}"))) == b"{}"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"null",
        b'"text"',
        b'{"prompt": "cut',
        b'{"prompt": "\xff"}',
        b'{"prompt": "\xed\xa0\x80"}',
        b'{"prompt": "a\x00b"}',
        b"\xef\xbb\xbf{}",
        '{"prompt": "a"}'.encode("utf-16"),
        '{"prompt": "a"}'.encode("utf-16-le"),
        b'{"prompt": "a"} {}',
        b"{'prompt': 'a'}",
    ],
)
def test_what_is_not_one_json_object_in_utf8_is_refused(body: bytes) -> None:
    assert refusal(body).field == ""


@pytest.mark.parametrize("depth", [65, 990, 100_000])
@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a":', "}")])
def test_deep_nesting_is_refused_wherever_it_is(depth: int, opening: str, closing: str) -> None:
    nested = opening * depth + "1" + closing * depth
    for field in ("prompt", "messages", "zebra"):
        assert refusal(f'{{"{field}": {nested}}}'.encode()).field.startswith(field)
    assert refusal(f'{{"zebra": NaN, "prompt": {nested}}}'.encode()).http_status == 400
    refusal((opening * depth).encode())


def test_brackets_within_strings_are_no_nesting() -> None:
    text = "[{" * 1000
    assert decode(json.dumps({"prompt": text}).encode(), TokenizeBody).prompt == text


def test_many_keys_are_refused_by_the_first_unknown_one() -> None:
    body = json.dumps({f"key{number}": 0 for number in range(10_000)}).encode()
    assert refusal(body).field == "key0"


def test_of_duplicate_keys_the_last_counts() -> None:
    assert decode(b'{"prompt": "a", "prompt": "b"}', TokenizeBody).prompt == "b"


def test_half_a_surrogate_pair_is_refused_by_field_and_a_whole_one_taken() -> None:
    assert refusal(b'{"prompt": "a\\ud800b"}').field == "prompt"
    assert refusal(b'{"model": "x", "messages": [{"role": "user", "content": "\\uDC00"}]}').field == "messages"
    assert "\\ud800" not in refusal(b'{"\\ud800": 1}').field
    assert decode(b'{"prompt": "\\ud83d\\ude00"}', TokenizeBody).prompt == "\U0001f600"


def test_an_integer_of_thousands_of_digits_is_refused_by_field() -> None:
    body = b'{"model": "m", "messages": [{"role": "user", "content": ""}], "max_tokens": ' + b"9" * 5000 + b"}"
    with pytest.raises(KvferryError) as caught:
        decode(body, ChatBody)
    assert caught.value.field == "max_tokens"


@pytest.mark.parametrize(
    ("body", "field", "words"),
    [
        ({"zebra": 1}, "zebra", "not a field"),
        ({"messages": [{"content": "x"}]}, "messages[0].role", "required"),
        ({"messages": [{"role": "wibble", "content": "x"}]}, "messages[0].role", "'wibble'"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "str | array"),
        ({"messages": [{"role": "user", "content": "x", "audio": {}}]}, "messages[0].audio", "not supported"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text", "required"),
        ({"prompt": 5}, "prompt", "got `int`"),
    ],
)
def test_a_refusal_names_the_field_and_the_reason(body: dict[str, Any], field: str, words: str) -> None:
    error = refusal(json.dumps(body).encode())
    assert error.field == field
    assert words in error.message


@pytest.mark.parametrize("piece", [" - at `$", "`", "Object contains unknown field `", " - at `$.a[...]`"])
def test_names_made_to_look_like_a_refusal_are_worked_off_in_linear_time(piece: str) -> None:
    # H034: what is quadratic here takes minutes.
    name = piece * (1_000_000 // len(piece))
    for problem in (name, name + "x", f"Object contains unknown field `{name}`", f"Expected `int` - at `$.{name}`"):
        json_body._refusal(problem)
    assert refusal(json.dumps({name[:3000]: 1}).encode()).http_status == 400


def test_a_float_that_is_no_number_is_let_through_to_its_check() -> None:
    body = b'{"model": "m", "messages": [{"role": "user", "content": ""}], "temperature": NaN}'
    assert str(decode(body, ChatBody).temperature) == "nan"


async def test_a_large_body_is_decoded_like_a_small_one() -> None:
    text = "x" * (json_body.LARGE_BODY_BYTES + 1)
    assert (await decode_body(json.dumps({"prompt": text}).encode(), TokenizeBody)).prompt == text
    with pytest.raises(KvferryError):
        await decode_body(b" " * json_body.LARGE_BODY_BYTES + b"[]", TokenizeBody)


FREE_FIELDS = [
    '"structured_outputs": {"json": {"x": %s}}',
    '"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"x": %s}}}',
    '"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": %s}}}]',
    '"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "x": %s}}}]',
    '"metadata": %s',
    '"temperature": NaN, "structured_outputs": {"json": {"x": %s}}',
]


@pytest.mark.parametrize("field", FREE_FIELDS, ids=range(len(FREE_FIELDS)))
async def test_no_depth_of_nesting_in_a_field_of_any_json_is_a_defect(field: str) -> None:
    # H031: just below, at, and far beyond where a recursive walk over it would end.
    door = Door(says("x"))
    for depth in (30, 65, 300, 900, 990, 100_000):
        for opening, closing in (("[", "]"), ('{"a":', "}")):
            nested = opening * depth + "1" + closing * depth
            body = f'{{"model": "{MODEL}", "messages": [{{"role": "user", "content": "x"}}], {field % nested}}}'
            assert (await door.post("/v1/chat/completions", body.encode())).status_code in (200, 400)
