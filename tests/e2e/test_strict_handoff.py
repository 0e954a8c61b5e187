"""Real processes, and a transport that is required but not to be had: strict refuses, and otherwise it is a warning."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from kvferry.client import Client, text_request
from kvferry_rpc.common_pb2 import ErrorCode, SamplingParams
from runtime.errors import KvferryError
from tests.support.live_cluster import LiveCluster, live_cluster

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]
FLAGS = (
    *("--num-blocks", "256", "--no-restart", "--strict-handoff"),
    *("--forbid-transports", "shm,nixl,ucx", "--require-transport", "shm"),
)
MODEL = "tiny-real"


def _ask(cluster: LiveCluster, **fields: Any) -> httpx.Response:
    prompt = [7, *range(20, 70)]
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 6, "temperature": 0, "ignore_eos": True, **fields}
    return httpx.post(f"{cluster.base_url}/v1/completions", json=body, timeout=60)


def _receipt(cluster: LiveCluster, request_id: str) -> dict[str, Any]:
    receipt: dict[str, Any] = httpx.get(f"{cluster.base_url}/v1/receipts/{request_id}").json()
    return receipt


def test_a_strict_router_refuses_every_request_over_another_transport(tmp_path: Path) -> None:
    with live_cluster(tmp_path, *FLAGS) as cluster:
        for stream in (False, True):
            answer = _ask(cluster, stream=stream)
            assert answer.status_code == 502, answer.text
            error = answer.json()["error"]
            assert (error["code"], error["param"]) == ("handoff_failed", "transport")
            assert "from prefill-0 to decode-0 over tcp, and shm is required" in error["message"]
            receipt = _receipt(cluster, answer.headers["x-request-id"])
            # Whether decode had verified it by the time it was refused is left open: either half may come first.
            assert receipt["transport"] == "tcp"
            assert receipt["earlier_failures"] == [f"final: handoff_failed: {error['message']}"]
        with Client(cluster.grpc) as client:
            assert client.receipt(answer.headers["x-request-id"]).transport == "tcp"
            with pytest.raises(KvferryError) as caught:
                list(client.generate(text_request(MODEL, "Once", SamplingParams(max_tokens=4))))
        assert (caught.value.code, caught.value.field) == (ErrorCode.HANDOFF_FAILED, "transport")
        assert 'kvferry_strict_refusals_total{clause="transport"} 3.0' in _metrics(cluster)
        cluster.wait_at_rest()


def test_a_router_that_is_not_strict_answers_and_warns_once(tcp_cluster: LiveCluster) -> None:
    before = _degraded(tcp_cluster)
    for _ in range(2):
        answer = _ask(tcp_cluster, kv_receipt=True)
        assert answer.status_code == 200
        receipt = answer.json()["kv_receipt"]
        assert (receipt["transport"], receipt["checksum_verified"]) == ("tcp", True)
        assert receipt["commit_ms"] > 0
        assert receipt == _receipt(tcp_cluster, answer.headers["x-request-id"])
    assert _degraded(tcp_cluster) == before + 2
    assert tcp_cluster.log("router").count("not over shm, as required, but over tcp") == 1


def _degraded(cluster: LiveCluster) -> float:
    """Hand-offs over tcp where shm was required, so far."""
    name = 'kvferry_handoffs_degraded_total{expected="shm",used="tcp"} '
    return sum(float(line.removeprefix(name)) for line in _metrics(cluster).splitlines() if line.startswith(name))


def test_an_answer_cut_by_a_stop_string_has_the_whole_hand_off_on_its_receipt(tcp_cluster: LiveCluster) -> None:
    text = _ask(tcp_cluster, max_tokens=12).json()["choices"][0]["text"]
    answer = _ask(tcp_cluster, max_tokens=200, kv_receipt=True, stop=text[2:6]).json()
    assert answer["choices"][0]["finish_reason"] == "stop"
    receipt = answer["kv_receipt"]
    if receipt["handoff_id"]:  # The router may have found computing it on decode cheaper, the second time.
        assert receipt["checksum_verified"]
        assert receipt["checksum"]
    assert receipt["decode_ms"] > 0


def _metrics(cluster: LiveCluster) -> str:
    return httpx.get(f"{cluster.base_url}/metrics").text
