"""Workers of two processes each: the same text through a real hand-off, and no process left behind."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from kvferry.run_dir import process_start_ticks
from tests.support.live_cluster import LiveCluster, live_cluster

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]
WORKERS = ("prefill-0", "decode-0")
PROMPTS = ["The old king of the hills", "Once upon a time, a very long time ago, there was a", "7 + 5 ="]


def _ask(cluster: LiveCluster, prompt: str) -> dict[str, Any]:
    body = {"model": "tiny-real", "prompt": prompt, "max_tokens": 24, "temperature": 0}
    answer = httpx.post(f"{cluster.base_url}/v1/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    given: dict[str, Any] = answer.json()
    return given


def _children(pid: int) -> list[int]:
    return [int(child) for path in Path(f"/proc/{pid}/task").glob("*/children") for child in path.read_text().split()]


def test_split_workers_give_the_text_of_whole_ones_and_leave_no_process(cluster: LiveCluster, tmp_path: Path) -> None:
    expected = [_ask(cluster, prompt)["choices"] for prompt in PROMPTS]
    with live_cluster(tmp_path, "--tensor-parallel", "2", "--num-blocks", "128", "--strict-handoff") as split:
        ranks = [pid for worker in WORKERS for pid in _children(split.pid(worker))]
        assert len(ranks) == len(WORKERS)
        assert [_ask(split, prompt)["choices"] for prompt in PROMPTS] == expected
        split.wait_at_rest()
    assert [pid for pid in ranks if process_start_ticks(pid) is not None] == []
