"""What strangers find on the ports of a real cluster: loopback only, nothing unpickled, bounds on every input; and
what its processes do while nobody talks to them."""

import os
import pickle
import socket
import time
from contextlib import suppress
from pathlib import Path

import grpc
import httpx
import pytest

from kvferry_rpc import public_pb2, public_pb2_grpc
from tests.support.listening import LOOPBACK, listening
from tests.support.live_cluster import LiveCluster
from tests.support.pickled import Bomb
from tests.support.raw_http import RawClient

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]
MODEL = "tiny-real"


def _listening(pids: list[int]) -> list[tuple[str, int]]:
    return [found for pid in pids for found in listening(pid)]


def _all_pids(cluster: LiveCluster) -> list[int]:
    return [cluster.launcher.pid, *cluster.pids.values()]


def _works(cluster: LiveCluster) -> bool:
    body = {"model": MODEL, "prompt": "Hi", "max_tokens": 2, "ignore_eos": True, "kv_receipt": True}
    answer = httpx.post(f"{cluster.base_url}/v1/completions", json=body, timeout=30)
    return answer.status_code == 200 and bool(answer.json()["kv_receipt"]["checksum_verified"])


def test_every_port_is_on_the_loopback_address(cluster: LiveCluster) -> None:
    found = _listening(_all_pids(cluster))
    # The router has three, each worker one, and one more for its KV links: prefill workers take pulls.
    assert len(found) == 3 + 3 + 3
    assert {address for address, _ in found} <= LOOPBACK


@pytest.mark.parametrize(
    "prefix", [b"", b"\x00\x00\x01\x00", b"GET / HTTP/1.1\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"]
)
def test_no_port_unpickles_what_a_stranger_sends(cluster: LiveCluster, tmp_path: Path, prefix: bytes) -> None:
    mark = tmp_path / "unpickled"
    payload = pickle.dumps(Bomb(mark))
    pickle.loads(payload)  # noqa: S301 - our own bytes, and the point of the test
    assert mark.exists(), "the bomb must be able to go off"
    mark.unlink()
    for _, port in _listening(_all_pids(cluster)):
        with socket.create_connection(("127.0.0.1", port), timeout=10) as stranger:
            stranger.sendall(prefix + len(payload).to_bytes(4, "big") + payload)
            with suppress(OSError):  # It may have hung up already.
                stranger.shutdown(socket.SHUT_WR)
                while stranger.recv(4096):
                    pass
    assert not mark.exists()
    assert _works(cluster)


def _rss_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize(
    "piece",
    [b"x" * 65536, b"x-header: y\r\n" * 5000],
    ids=["a line without end", "headers without end"],
)
def test_a_gigantic_head_is_cut_off_and_costs_no_memory(cluster: LiveCluster, piece: bytes) -> None:
    assert _works(cluster)
    endless = piece * (32 * 1024 * 1024 // len(piece))
    before = _rss_bytes(cluster.pids["router"])
    for _ in range(20):
        client = RawClient(cluster.http)
        client.send(b"GET /health HTTP/1.1\r\nhost: x\r\nx-first: ")
        with pytest.raises(ConnectionError):
            client.send(endless)
        client.leave()
    assert _rss_bytes(cluster.pids["router"]) - before < 10 * 1024 * 1024
    assert _works(cluster)


def test_a_message_too_large_for_the_public_grpc_port_is_refused(cluster: LiveCluster) -> None:
    request = public_pb2.GenerateRequest(model=MODEL, text="x" * (6 * 1024 * 1024))
    with grpc.insecure_channel(cluster.grpc, options=[("grpc.max_send_message_length", -1)]) as channel:
        stub = public_pb2_grpc.KvferryStub(channel)
        with pytest.raises(grpc.RpcError) as refused:
            list(stub.Generate(request, timeout=30))
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert stub.ListModels(public_pb2.ListModelsRequest(), timeout=30).models[0].id == MODEL


def _cpu_seconds(pids: list[int]) -> float:
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def test_an_idle_cluster_uses_next_to_no_processor_time(cluster: LiveCluster) -> None:
    assert _works(cluster)
    cluster.wait_at_rest()
    pids = _all_pids(cluster)
    workers = [cluster.pid(name) for name in cluster.pids if name != "router"]
    used, began = _cpu_seconds(pids), time.monotonic()
    used_by_workers = [_cpu_seconds([pid]) for pid in workers]
    time.sleep(3)  # Idleness is only seen over time.
    watched_s = time.monotonic() - began
    assert (_cpu_seconds(pids) - used) / watched_s < 0.2
    shares = [(_cpu_seconds([pid]) - before) / watched_s for pid, before in zip(workers, used_by_workers, strict=True)]
    assert max(shares) < 0.02
