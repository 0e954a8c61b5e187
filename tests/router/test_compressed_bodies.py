"""gzip and deflate bodies: the same request, and never more expanded than a body may have (H026's kind)."""

import gzip
import json
import tracemalloc
import zlib

import pytest
from starlette.datastructures import Headers

from router.http import json_body
from router.http.asgi import Message, Receive
from router.http.errors import HttpError
from router.http.json_body import BodyReader
from runtime.limits import MAX_BODY_BYTES
from tests.support.http_door import Door, completion_body, says

BODY = json.dumps(completion_body(prompt="word " * 500)).encode()
PACKED = gzip.compress(BODY, mtime=0)
NOT_WHOLE = [
    b"",
    b"{}",
    PACKED[:-1],
    PACKED[:20],
    PACKED + b"{}",
    PACKED + PACKED,
    PACKED[:-8] + bytes(8),
    zlib.compress(BODY),
]


def headers(*encodings: str) -> Headers:
    raw = [(b"content-type", b"application/json"), *((b"content-encoding", name.encode()) for name in encodings)]
    return Headers(raw=raw)


def pieces(data: bytes, size: int) -> Receive:
    parts = [data[start : start + size] for start in range(0, len(data), size)] or [b""]

    async def receive() -> Message:
        return {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts)}

    return receive


async def refusal(encoding: str, data: bytes, size: int = 65536, **bounds: int) -> HttpError:
    with pytest.raises(HttpError) as caught:
        await BodyReader(**bounds).read(headers(encoding), pieces(data, size))
    return caught.value


@pytest.mark.parametrize(
    ("encoding", "data"), [("gzip", PACKED), ("deflate", zlib.compress(BODY))], ids=["gzip", "deflate"]
)
@pytest.mark.parametrize("size", [1, 7, 65536])
async def test_a_compressed_body_is_the_same_body(encoding: str, data: bytes, size: int) -> None:
    assert await BodyReader().read(headers(encoding), pieces(data, size)) == BODY
    assert await BodyReader().read(headers(encoding.upper()), pieces(data, size)) == BODY


async def test_a_compressed_request_gets_the_same_answer() -> None:
    door = Door(says("x"))
    plain = await door.post("/v1/completions", BODY)
    packed = await door.post("/v1/completions", PACKED, headers={"content-encoding": "gzip"})
    assert (plain.status_code, packed.status_code) == (200, 200)
    first, second = door.source.requests
    assert first.prompt_token_ids == second.prompt_token_ids


async def test_a_bomb_is_refused_with_no_more_memory_than_a_body_may_have() -> None:
    bomb = gzip.compress(bytes(32 * 1024 * 1024), 1)
    assert len(bomb) < MAX_BODY_BYTES
    tracemalloc.start()
    try:
        error = await refusal("gzip", bomb)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (error.status, error.code) == (413, "body_too_large")
    assert peak_bytes < 4 * MAX_BODY_BYTES


@pytest.mark.parametrize("size", [3, 65536])
async def test_the_largest_body_passes_and_one_byte_more_does_not(size: int) -> None:
    data = b" " * 998 + b"{}"
    reader = BodyReader(max_bytes=1000)
    assert await reader.read(headers("gzip"), pieces(gzip.compress(data), size)) == data
    assert (await refusal("gzip", gzip.compress(data + b" "), size, max_bytes=1000)).status == 413


async def test_bytes_that_expand_to_nothing_count_too() -> None:
    empty_block = b"\0\0\0\xff\xff"
    data = zlib.compress(b"")[:2] + empty_block * 400
    assert (await refusal("deflate", data, 100, max_bytes=1000)).status == 413


@pytest.mark.parametrize("data", NOT_WHOLE, ids=range(len(NOT_WHOLE)))
async def test_what_is_not_one_whole_stream_is_refused(data: bytes) -> None:
    error = await refusal("gzip", data)
    assert (error.status, error.code) == (400, "invalid_request")
    assert (await refusal("gzip", data, 1)).status == 400


@pytest.mark.parametrize("encodings", [("zstd",), ("br",), ("gzip", "gzip"), ("identity", "gzip"), ("gzip, deflate",)])
async def test_other_encodings_are_refused_with_those_that_are_taken(encodings: tuple[str, ...]) -> None:
    with pytest.raises(HttpError) as caught:
        await BodyReader().read(headers(*encodings), pieces(BODY, 65536))
    assert caught.value.status == 415
    assert caught.value.headers == {"accept-encoding": "gzip, deflate, identity"}


async def test_what_is_held_is_given_back_whatever_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_body, "MAX_BUFFERED_BYTES", 1500)
    reader = BodyReader(max_bytes=1000)
    for data in (gzip.compress(b" " * 5000), b"nonsense", gzip.compress(b" " * 900)[:-1]):
        for _ in range(3):
            with pytest.raises(HttpError) as caught:
                await reader.read(headers("gzip"), pieces(data, 7))
            assert caught.value.status in (400, 413)
    assert len(await reader.read(headers("gzip"), pieces(gzip.compress(b" " * 1000), 7))) == 1000
