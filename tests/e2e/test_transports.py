"""Each transport in a real cluster: the one asked for moves the blocks, and its link costs nothing when idle."""

import os
import time
from pathlib import Path

import pytest

from kvferry.client import Client
from kvferry_rpc.common_pb2 import SamplingParams
from kvferry_rpc.public_pb2 import GenerateRequest
from tests.support.live_cluster import LiveCluster, live_cluster

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

WATCHED_S = 4.0
MOST_OF_A_CORE = 0.02


def _transport_used(cluster: LiveCluster) -> str:
    with Client(cluster.grpc) as client:
        request = GenerateRequest(
            model=client.default_model(),
            text="The ferry leaves at noon, and with it goes the post.",
            sampling=SamplingParams(max_tokens=4, temperature=0.0),
            with_receipt=True,
        )
        *_, last = client.generate(request)
    receipt = last.finish.receipt
    assert receipt.checksum_verified
    assert receipt.expected_transport == receipt.transport
    return receipt.transport


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize("transport", ["ucx", "nixl"])
def test_a_worker_with_a_link_up_uses_next_to_no_processor_time_when_idle(tmp_path: Path, transport: str) -> None:
    with live_cluster(tmp_path, "--transports", transport, "--num-blocks", "256") as cluster:
        assert _transport_used(cluster) == transport
        cluster.wait_at_rest()
        workers = {name: cluster.pid(name) for name in cluster.pids if name != "router"}
        assert len(workers) == 2
        before = {name: _cpu_seconds(pid) for name, pid in workers.items()}
        began = time.monotonic()
        time.sleep(WATCHED_S)  # Idleness is only seen over time.
        watched_s = time.monotonic() - began
        shares = {name: (_cpu_seconds(pid) - before[name]) / watched_s for name, pid in workers.items()}
        assert all(share < MOST_OF_A_CORE for share in shares.values()), shares
