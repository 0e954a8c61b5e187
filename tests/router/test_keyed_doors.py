"""Both doors with API keys: what needs one, whose receipts are whose, and what reaches the cluster."""

import hashlib
import json
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvferry_rpc import public_pb2, public_pb2_grpc
from kvferry_rpc.common_pb2 import Error, ErrorCode, KVReceipt, SamplingParams
from router.dispatch.receipts import ReceiptStore
from router.generation import GenerationRequest
from router.grpc.server import SERVICE_NAME, PublicService
from router.observation.live_requests import LiveRequests
from router.tenant_limits import MeteredSource
from router.tenants import TenantDirectory
from runtime.clock import ManualClock
from runtime.errors import ERROR_METADATA_KEY
from runtime.grpc_life import GrpcServer, channel
from tests.support.http_door import MODEL, Door, chat_body, completion_body, says

CHAT = "/v1/chat/completions"
RED = {"authorization": "Bearer red-key"}
BLUE = {"x-api-key": "blue-key"}
GENERATIONS = [CHAT, "/v1/completions", "/v1/responses", "/v1/messages"]
KEYED = [
    *(("POST", path) for path in GENERATIONS),
    ("POST", "/v1/messages/count_tokens"),
    ("POST", "/tokenize"),
    ("GET", "/v1/models"),
    ("GET", f"/v1/models/{MODEL}"),
    ("GET", "/v1/receipts/r1"),
    ("GET", "/debug/requests"),
]


def directory(tmp_path: Path, **red: Any) -> TenantDirectory:
    entries = [
        {"tenant": name, "key_sha256": hashlib.sha256(f"{name}-key".encode()).hexdigest(), **limits}
        for name, limits in (("red", red), ("blue", {"max_priority": 7}))
    ]
    path = tmp_path / "keys"
    path.write_text("\n".join(map(json.dumps, entries)))
    return TenantDirectory(path, b"the secret of a cluster", ManualClock())


def door(tmp_path: Path, *, protect_metrics: bool = False, **red: Any) -> Door:
    store = ReceiptStore(10)
    store.put(KVReceipt(request_id="r1"), "red")
    store.put(KVReceipt(request_id="r0"))
    return Door(
        says("An answer."), tenants=directory(tmp_path, **red), find_receipt=store.get, protect_metrics=protect_metrics
    )


@pytest.mark.parametrize(("method", "path"), KEYED)
@pytest.mark.parametrize(
    "headers",
    [{}, {"authorization": "Bearer wrong"}, {"authorization": "red-key"}, {"x-api-key": ""}, {"x-api-key": b"k\xe9y"}],
)
async def test_without_a_good_key_there_is_401_and_nothing_else(
    tmp_path: Path, method: str, path: str, headers: dict[str, Any]
) -> None:
    front = door(tmp_path)
    async with front.client() as client:
        answer = await client.request(method, path, headers=headers, content=b"{}")
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    assert answer.json()["error"]["type"] == "authentication_error"
    assert front.source.requests == []
    assert len(front.refused) == (1 if path in GENERATIONS else 0)


async def test_a_refused_key_costs_no_reading_of_its_body(tmp_path: Path) -> None:
    front = door(tmp_path)
    call = front.call(CHAT, chat_body())
    assert (await call.start())["status"] == 401
    await call.body()
    await call.task
    assert call.unread == 1


async def test_health_and_readiness_are_open_and_metrics_as_the_flag_says(tmp_path: Path) -> None:
    for protect_metrics in (False, True):
        async with door(tmp_path, protect_metrics=protect_metrics).client() as client:
            assert (await client.get("/health")).status_code == 200
            assert (await client.get("/ready")).status_code == 200
            assert (await client.get("/metrics")).status_code == (401 if protect_metrics else 200)
            assert (await client.get("/metrics", headers=BLUE)).status_code == 200
            assert (await client.get("/nowhere")).status_code == 404


async def test_a_key_opens_all_of_it_in_either_header(tmp_path: Path) -> None:
    front = door(tmp_path)
    for headers in (RED, BLUE):
        assert (await front.post(CHAT, chat_body(), headers=headers)).status_code == 200
        async with front.client() as client:
            assert (await client.get("/v1/models", headers=headers)).status_code == 200
    assert [request.tenant for request in front.source.requests] == ["red", "blue"]


async def test_a_receipt_is_found_by_the_tenant_whose_it_is_alone(tmp_path: Path) -> None:
    async with door(tmp_path).client() as client:
        assert (await client.get("/v1/receipts/r1", headers=RED)).status_code == 200
        mine, unknown, before_keys = [
            await client.get(f"/v1/receipts/{name}", headers=BLUE) for name in ("r1", "nobody", "r0")
        ]
    assert mine.status_code == unknown.status_code == before_keys.status_code == 404
    assert mine.content == unknown.content


@pytest.mark.parametrize(("admin", "seen"), [(False, ["red-1"]), (True, ["red-1", "blue-1"])])
async def test_requests_are_shown_to_their_own_tenant_and_to_an_admin(
    tmp_path: Path, admin: bool, seen: list[str]
) -> None:
    front = door(tmp_path, admin=admin)
    live = LiveRequests(front.services.clock, dict, model=MODEL)
    front.rebuild(live_requests=live.snapshot)
    with ExitStack() as held:
        for name in ("red", "blue"):
            request = GenerationRequest(f"{name}-1", (1, 2), SamplingParams(max_tokens=3), 1e9, tenant=name)
            held.enter_context(live.request(request, 99.0, [5]))
        async with front.client() as client:
            answer = (await client.get("/debug/requests", headers=RED)).json()
    assert [entry["id"] for entry in answer["in_flight"]] == seen
    assert answer["ended"] == []
    first = answer["in_flight"][0]
    assert (first["phase"], first["waits_for"], first["model"]) == ("queued", "its turn", MODEL)
    assert (first["prompt_tokens"], first["output_tokens"], first["max_tokens"]) == (2, 1, 3)
    assert first["in_phase_ms"] == 1000.0
    assert first["phases"] == [{"phase": "queued", "attempt": 0, "worker": "", "after_ms": 0.0}]
    async with front.client() as client:
        after = (await client.get("/debug/requests", headers=RED)).json()
    assert after["in_flight"] == []
    assert sorted(entry["id"] for entry in after["ended"]) == sorted(seen)
    assert {entry["phase"] for entry in after["ended"]} == {"finished"}


async def test_without_keys_everybody_sees_every_request() -> None:
    front = Door(says("x"))
    live = LiveRequests(front.services.clock, dict)
    front.rebuild(live_requests=live.snapshot)
    with live.request(GenerationRequest("r1", (1,), SamplingParams(max_tokens=3), 1e9), 99.0, []):
        async with front.client() as client:
            answer = (await client.get("/debug/requests")).json()
    assert [entry["id"] for entry in answer["in_flight"]] == ["r1"]


async def test_salts_of_tenants_differ_and_clients_can_only_split_their_own(tmp_path: Path) -> None:
    front = door(tmp_path)
    other_salt = front.services.tenants.authenticate("blue-key").salt
    for fields in ({}, {"cache_salt": "a"}, {"cache_salt": "b"}, {"cache_salt": other_salt.hex()}):
        for headers in (RED, BLUE):
            assert (await front.post(CHAT, chat_body(**fields), headers=headers)).status_code == 200
    salts = [request.cache_salt for request in front.source.requests]
    assert len(set(salts)) == len(salts) == 8
    assert b"" not in salts
    await front.post(CHAT, chat_body(cache_salt="a"), headers=RED)
    assert front.source.requests[-1].cache_salt == salts[2]


@pytest.mark.parametrize("value", ["", "x" * 65, 5, ["x"]])
async def test_a_cache_salt_is_1_to_64_characters(value: Any) -> None:
    front = Door(says("x"))
    answer = await front.post(CHAT, chat_body(cache_salt=value))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "cache_salt")


async def test_without_keys_the_salt_is_empty_unless_the_client_names_one() -> None:
    front = Door(says("x"))
    for fields in ({}, {"cache_salt": None}, {"cache_salt": "a"}):
        await front.post("/v1/completions", completion_body(**fields), headers={"authorization": "Bearer anything"})
    assert [bool(request.cache_salt) for request in front.source.requests] == [False, False, True]
    assert {request.tenant for request in front.source.requests} == {""}


async def test_a_priority_goes_as_high_as_the_key_allows(tmp_path: Path) -> None:
    front = door(tmp_path)
    for headers, priority, status in ((BLUE, 7, 200), (BLUE, 8, 400), (RED, 0, 200), (RED, 1, 400), (RED, -100, 200)):
        answer = await front.post(CHAT, chat_body(priority=priority), headers=headers)
        assert answer.status_code == status
        if status == 400:
            assert answer.json()["error"]["param"] == "priority"
    assert [request.priority for request in front.source.requests] == [7, 0, -100]
    assert (await front.post(CHAT, chat_body(priority=101), headers=BLUE)).status_code == 400


async def test_a_tenant_over_its_rate_gets_429_and_when_to_come_back(tmp_path: Path) -> None:
    front = door(tmp_path, max_tokens_per_minute=60)
    clock = ManualClock()
    front.rebuild(source=MeteredSource(front.source, front.services.tenants, clock, front.services.refused_at_door))
    body = completion_body(max_tokens=40, prompt=[1] * 40)
    assert (await front.post("/v1/completions", body, headers=RED)).status_code == 200
    answer = await front.post("/v1/completions", body, headers=RED)
    assert answer.status_code == 429
    assert (await front.post("/v1/completions", body, headers=BLUE)).status_code == 200
    clock.advance(float(answer.headers["retry-after"]))
    assert (await front.post("/v1/completions", body, headers=RED)).status_code == 200
    assert front.refused == ["overloaded"]


async def test_more_choices_than_the_tenant_may_ever_have_at_a_time_are_refused_for_good(tmp_path: Path) -> None:
    front = door(tmp_path, max_in_flight=3)
    for path, body, field in (
        (CHAT, chat_body(n=4), "n"),
        ("/v1/completions", completion_body(prompt=["x", "y"], n=2), "n"),
        ("/v1/completions", completion_body(n=1, best_of=4), "best_of"),
    ):
        answer = await front.post(path, body, headers=RED)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)
        assert "at most 3 with this API key" in answer.json()["error"]["message"]
    assert front.source.requests == []
    assert (await front.post(CHAT, chat_body(n=3), headers=RED)).status_code == 200
    assert (await front.post(CHAT, chat_body(n=4), headers=BLUE)).status_code == 200


# ---- gRPC ----


@asynccontextmanager
async def grpc_door(tmp_path: Path, **red: Any) -> AsyncIterator[tuple[Any, Door]]:
    front = door(tmp_path, **red)
    server = GrpcServer("127.0.0.1")
    service = PublicService(front.services, public_pb2.ClusterStateResponse)
    server.add_service(public_pb2_grpc.add_KvferryServicer_to_server, service, SERVICE_NAME, internal=False)
    await server.start()
    try:
        async with channel(server.address) as link:
            yield public_pb2_grpc.KvferryStub(link), front
    finally:
        await server.stop(0)


def calls(stub: Any, metadata: tuple[tuple[str, str], ...]) -> list[Any]:
    return [
        stub.Tokenize(public_pb2.TokenizeRequest(model=MODEL, text="x"), metadata=metadata),
        stub.ListModels(public_pb2.ListModelsRequest(), metadata=metadata),
        stub.ClusterState(public_pb2.ClusterStateRequest(), metadata=metadata),
        stub.GetReceipt(public_pb2.GetReceiptRequest(request_id="r1"), metadata=metadata),
    ]


async def generate(stub: Any, metadata: tuple[tuple[str, str], ...], **fields: Any) -> list[Any]:
    request = public_pb2.GenerateRequest(model=MODEL, text="x", **fields)
    return [part async for part in stub.Generate(request, metadata=metadata, timeout=10)]


async def test_every_grpc_call_needs_a_key(tmp_path: Path) -> None:
    async with grpc_door(tmp_path) as (stub, front):
        for metadata in ((), (("authorization", "Bearer wrong"),), (("x-api-key", "x" * 5000),)):
            for call in [*calls(stub, metadata), generate(stub, metadata)]:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call
                assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
                trailing = dict(caught.value.trailing_metadata() or ())
                assert Error.FromString(trailing[ERROR_METADATA_KEY]).code == ErrorCode.UNAUTHENTICATED
        assert front.source.requests == []


async def test_with_a_key_grpc_answers_and_a_receipt_is_its_tenants(tmp_path: Path) -> None:
    red, blue = (("authorization", "Bearer red-key"),), (("x-api-key", "blue-key"),)
    async with grpc_door(tmp_path) as (stub, front):
        for call in calls(stub, red):
            await call
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await calls(stub, blue)[-1]
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        await generate(stub, red)
        await generate(stub, blue, priority=7, cache_salt="a")
        for fields in ({"priority": 8}, {"priority": -101}, {"cache_salt": "x" * 65}):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await generate(stub, blue, **fields)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        first, second = front.source.requests
        assert (first.tenant, first.priority) == ("red", 0)
        assert (second.tenant, second.priority) == ("blue", 7)
        blue_tenant = front.services.tenants.authenticate("blue-key")
        assert second.cache_salt == blue_tenant.salt_for("a") != first.cache_salt


async def test_over_grpc_too_a_tenant_may_not_ask_for_more_choices_than_it_can_have(tmp_path: Path) -> None:
    async with grpc_door(tmp_path, max_in_flight=3) as (stub, _):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await generate(stub, (("x-api-key", "red-key"),), n=4)
        assert Error.FromString(dict(caught.value.trailing_metadata() or ())[ERROR_METADATA_KEY]).field == "n"
        assert await generate(stub, (("x-api-key", "red-key"),), n=3)


async def test_a_defect_is_logged_at_both_doors_without_what_it_says(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # What an unforeseen exception says may quote a prompt.
    def broken(_: Any) -> Any:
        return [RuntimeError("the secret words")]

    caplog.set_level("DEBUG")
    async with grpc_door(tmp_path) as (stub, front):
        front.source.script = broken
        assert (await front.post(CHAT, chat_body(), headers=RED)).status_code == 500
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await generate(stub, (("x-api-key", "red-key"),))
        assert caught.value.code() is grpc.StatusCode.INTERNAL
        assert "secret words" not in (caught.value.details() or "")
    assert caplog.text.count("RuntimeError") == 2
    assert "secret words" not in caplog.text
    assert "scripted_source" in caplog.text
