"""The access log: one line a request, its facts as fields, and nothing of its text."""

import json
import logging

import httpx
import pytest

from kvferry_rpc.common_pb2 import ErrorCode
from router.observation.access_log import AccessLog, AccessNote, log_call
from runtime.clock import ManualClock
from runtime.errors import KvferryError
from runtime.telemetry import JsonFormatter
from tests.support.http_door import Door, chat_body, ids_of, says

TRACEPARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
CHAT = "/v1/chat/completions"


def written(caplog: pytest.LogCaptureFixture) -> list[dict[str, object]]:
    lines = [record for record in caplog.records if record.name == "router.observation.access_log"]
    return [json.loads(JsonFormatter("router").format(record)) for record in lines]


async def ask(door: Door, method: str, path: str, **options: object) -> httpx.Response:
    transport = httpx.ASGITransport(AccessLog(door.app, ManualClock()))  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=transport, base_url="http://door") as client:
        return await client.request(method, path, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_leaves_a_line_with_its_facts_and_none_of_its_words(
    caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    caplog.set_level(logging.INFO, "router.observation.access_log")
    door = Door(says("An answer."), begin_trace=lambda header: header or "")
    body = {**chat_body(), "stream": stream}
    response = await ask(door, "POST", f"{CHAT}?secret=word", json=body, headers={"traceparent": TRACEPARENT})
    (line,) = written(caplog)
    assert (line["method"], line["path"], line["status"]) == ("POST", CHAT, 200)
    assert line["request_id"] == response.headers["x-request-id"]
    assert line["trace_id"] == TRACEPARENT.split("-")[1]
    assert line["tenant"] == ""
    assert isinstance(line["prompt_tokens"], int)
    assert line["prompt_tokens"] > 0
    assert line["output_tokens"] == len(ids_of("An answer."))
    assert line["level"] == "info"
    assert door.source.requests[0].traceparent == TRACEPARENT
    assert door.source.requests[0].endpoint == "chat"
    text = json.dumps(line)
    assert "answer" not in text
    assert "secret" not in text


async def test_refusals_and_unknown_paths_leave_a_line_too(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "router.observation.access_log")
    door = Door(says("An answer."))
    await ask(door, "POST", CHAT, content=b"{", headers={"content-type": "application/json"})
    await ask(door, "GET", "/a%0Ab" + "c" * 1000)
    first, second = written(caplog)
    assert (first["status"], second["status"]) == (400, 404)
    assert second["path"] == ("/a%0Ab" + "c" * 1000)[:256]


@pytest.mark.parametrize(
    ("problem", "status"),
    [
        (None, "OK"),
        (KvferryError(ErrorCode.OVERLOADED, "words"), "RESOURCE_EXHAUSTED"),
        (ValueError("words"), "INTERNAL"),
        (GeneratorExit(), "CANCELLED"),
    ],
)
def test_a_call_over_grpc_leaves_a_line_with_its_status(
    caplog: pytest.LogCaptureFixture, problem: BaseException | None, status: str
) -> None:
    caplog.set_level(logging.INFO, "router.observation.access_log")

    def call() -> None:
        with log_call("Generate", AccessNote("gen-1", tenant="red", output_tokens=3), ManualClock()):
            if problem is not None:
                raise problem

    if problem is None:
        call()
    else:
        with pytest.raises(type(problem)):
            call()
    (line,) = written(caplog)
    assert (line["method"], line["path"], line["status"]) == ("gRPC", "Generate", status)
    assert (line["request_id"], line["tenant"], line["output_tokens"]) == ("gen-1", "red", 3)
    assert "words" not in json.dumps(line)
