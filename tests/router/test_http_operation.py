"""The HTTP door's endpoints of operation: kept receipts, models, tokens, health, readiness and metrics."""

import asyncio
from typing import Any

from kvferry_rpc.common_pb2 import KVReceipt
from router.http.openai_responses import receipt_fields
from tests.support.http_door import (
    CONTEXT,
    MODEL,
    Door,
    chat_body,
    completion_body,
    ids_of,
    says,
)

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


async def get(door: Door, path: str) -> Any:
    async with door.client() as client:
        return await client.get(path)


async def test_a_kept_receipt_is_found_by_id() -> None:
    kept = KVReceipt(request_id="r1", bytes_sent=2**40, checksum=b"\xab\xcd", earlier_failures=["x"], prefill_ms=1.25)
    door = Door(says("x"), find_receipt=lambda request_id, tenant: {"r1": kept}.get(request_id))
    body = (await get(door, "/v1/receipts/r1")).json()
    assert body == receipt_fields(kept)
    assert (body["bytes_sent"], body["checksum"], body["earlier_failures"]) == (2**40, "abcd", ["x"])
    assert set(body) == {field.name for field in KVReceipt.DESCRIPTOR.fields}
    missing = await get(door, "/v1/receipts/r2")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "receipt_not_found")


async def test_models_are_listed_and_found() -> None:
    door = Door(says("x"))
    listed = (await get(door, "/v1/models")).json()
    assert [model["id"] for model in listed["data"]] == [MODEL]
    found = (await get(door, f"/v1/models/{MODEL}")).json()
    assert found == listed["data"][0]
    assert found["max_model_len"] == CONTEXT
    missing = await get(door, "/v1/models/org/other")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")


async def test_tokenize_gives_the_ids_that_generation_uses() -> None:
    door = Door(says("x"))
    for body, path, request in [
        ({"prompt": "Once upon"}, COMPLETIONS, completion_body()),
        ({"model": MODEL, "messages": chat_body()["messages"]}, CHAT, chat_body()),
    ]:
        answer = (await door.post("/tokenize", body)).json()
        await door.post(path, request)
        assert answer["tokens"] == list(door.source.requests[-1].prompt_token_ids)
        assert (answer["count"], answer["max_model_len"]) == (len(answer["tokens"]), CONTEXT)
    for wrong in ({}, {"prompt": "x", "messages": chat_body()["messages"]}):
        assert (await door.post("/tokenize", wrong)).json()["error"]["param"] == "prompt"
    assert (await door.post("/tokenize", {"model": "other", "prompt": "x"})).status_code == 404


async def test_health_and_readiness_are_two_things() -> None:
    reasons: list[str | None] = [None, "no decode worker is attached"]
    door = Door(says("x"), unready_reason=lambda: reasons.pop(0))
    assert (await get(door, "/ready")).status_code == 200
    unready = await get(door, "/ready")
    assert (unready.status_code, unready.headers["retry-after"]) == (503, "1")
    assert "no decode worker" in unready.json()["error"]["message"]
    assert (await get(door, "/health")).status_code == 200


async def test_a_draining_door_refuses_new_work_and_stays_alive() -> None:
    draining = False
    release = asyncio.Event()
    door = Door(lambda _: [ids_of("old"), release, ids_of(" work")], draining=lambda: draining)
    running = asyncio.create_task(door.post(CHAT, chat_body()))
    await door.source.wait_until(lambda source: bool(source.running))
    draining = True
    refused = await door.post(CHAT, chat_body())
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "unavailable")
    assert refused.headers["retry-after"] == "1"
    assert (await get(door, "/ready")).status_code == 503
    assert (await get(door, "/health")).status_code == 200
    release.set()
    assert (await running).json()["choices"][0]["message"]["content"] == "old work"


async def test_metrics_are_passed_on() -> None:
    answer = await get(Door(says("x")), "/metrics")
    assert (answer.text, answer.headers["content-type"]) == ("up 1\n", "text/plain; version=0.0.4")
