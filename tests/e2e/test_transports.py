"""The libraries in a real cluster: the one asked for moves the blocks, between pools of unequal blocks, and changes no
text; and its link costs nothing when idle."""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvferry.client import Client, text_request
from kvferry.verify import read_prompts
from kvferry_rpc.common_pb2 import KVReceipt, SamplingParams
from tests.support.live_cluster import LiveCluster, live_cluster

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

MODEL = "tiny-real"
PROMPTS = read_prompts(Path(__file__).parents[1] / "data" / "prompts_short.jsonl")[::6]
AT_ONCE = 4
WATCHED_S = 3.0
MOST_OF_A_CORE = 0.02


def _answer(client: Client, number: int) -> tuple[list[int], KVReceipt]:
    sampling = SamplingParams(max_tokens=16, temperature=0.8, top_p=0.95, seed=number)
    request = text_request(MODEL, PROMPTS[number], sampling)
    request.has_seed = request.with_receipt = True
    parts = list(client.generate(request))
    return [token.token_id for part in parts for token in part.tokens], parts[-1].finish.receipt


def _answers(cluster: LiveCluster) -> list[tuple[list[int], KVReceipt]]:
    with Client(cluster.grpc) as client, ThreadPoolExecutor(AT_ONCE) as threads:
        return list(threads.map(lambda number: _answer(client, number), range(len(PROMPTS))))


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _shares_of_a_core(pids: dict[str, int]) -> dict[str, float]:
    before = {name: _cpu_seconds(pid) for name, pid in pids.items()}
    began = time.monotonic()
    time.sleep(WATCHED_S)  # Idleness is only seen over time.
    watched_s = time.monotonic() - began
    return {name: (_cpu_seconds(pid) - before[name]) / watched_s for name, pid in pids.items()}


@pytest.mark.parametrize(("transport", "block_size", "decode_block_size"), [("ucx", "16", "32"), ("nixl", "32", "16")])
def test_another_library_and_unequal_blocks_change_no_text_and_an_idle_link_uses_next_to_no_processor_time(
    cluster: LiveCluster, tmp_path: Path, transport: str, block_size: str, decode_block_size: str
) -> None:
    expected = [tokens for tokens, _ in _answers(cluster)]
    sizes = ("--prefill-block-size", block_size, "--decode-block-size", decode_block_size, "--num-blocks", "256")
    with live_cluster(tmp_path, "--transports", transport, "--strict-handoff", "--no-restart", *sizes) as other:
        for _ in ("cold", "warm"):
            answers = _answers(other)
            assert [tokens for tokens, _ in answers] == expected
            for _, receipt in answers:
                assert (receipt.transport, receipt.expected_transport) == (transport, transport)
                assert receipt.checksum_verified
                assert receipt.tokens_recomputed == 0
        other.wait_at_rest()
        workers = {name: other.pid(name) for name in other.pids if name != "router"}
        assert len(workers) == 2
        shares = _shares_of_a_core(workers)
        assert all(share < MOST_OF_A_CORE for share in shares.values()), shares
