"""One request through a whole cluster, as its operator sees it: traces, metrics, the log, and the list of requests."""

import json
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.live_cluster import LiveCluster

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]
TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PARTS = {
    "request": "",
    "queue": "request",
    "attempt 1": "request",
    "admit": "attempt 1",
    "prefill worker": "attempt 1",
    "wait": "prefill worker",
    "compute": "prefill worker",
    "transfer": "prefill worker",
    "decode worker": "attempt 1",
    "receive": "decode worker",
    "verify": "decode worker",
    "decode": "decode worker",
}


def spans_of(path: Path) -> list[dict[str, Any]]:
    """Of this test's trace. Processes write them within a second, and tell nobody."""
    deadline = time.monotonic() + 60
    while True:
        spans = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
        ours = [span for span in spans if span["context"]["trace_id"] == f"0x{TRACE}"]
        if len(ours) >= len(PARTS) or time.monotonic() > deadline:
            return ours
        time.sleep(0.1)


def test_a_request_leaves_one_trace_one_line_and_its_counts_in_every_place(cluster: LiveCluster) -> None:
    body = {"model": "tiny-real", "prompt": "The trace of this very prompt. " * 8, "max_tokens": 8, "temperature": 0}
    with httpx.Client(base_url=cluster.base_url, timeout=60) as client:
        response = client.post("/v1/completions", json=body, headers={"traceparent": f"00-{TRACE}-{SPAN}-01"})
        request_id, usage = response.json()["id"], response.json()["usage"]
        ended = client.get("/debug/requests").json()["ended"]
        families = list(text_string_to_metric_families(client.get("/metrics").text))

    spans = spans_of(cluster.state_dir.parent / "spans")
    names = {span["context"]["span_id"]: span["name"] for span in spans}
    assert {span["name"]: names.get(span["parent_id"], "") for span in spans} == PARTS
    assert len(spans) == len(PARTS)
    by_name = {span["name"]: span for span in spans}
    assert by_name["request"]["parent_id"] == f"0x{SPAN}"
    assert by_name["request"]["attributes"]["kvferry.request_id"] == request_id
    processes = {name: span["resource"]["attributes"]["service.instance.id"] for name, span in by_name.items()}
    assert processes["compute"] == "prefill-0"
    assert processes["decode"].startswith("decode-")
    assert processes["request"].startswith("router-")

    view = next(entry for entry in ended if entry["id"] == request_id)
    assert (view["phase"], view["endpoint"], view["prefill_worker"]) == ("finished", "completions", "prefill-0")
    assert view["prompt_tokens"] == usage["prompt_tokens"]
    assert view["output_tokens"] == usage["completion_tokens"]
    assert [begin["phase"] for begin in view["phases"]][:2] == ["queued", "prefill"]

    samples = {(sample.name, *sample.labels.values()): sample.value for family in families for sample in family.samples}
    assert samples[("kvferry_receipts_total", "proved")] >= 1
    assert samples[("kvferry_time_to_second_token_seconds_count",)] >= 1
    # Load reports of workers come a few times a second: only that they are there is sure.
    assert ("kvferry_worker_steps_total", "prefill-0") in samples

    lines = [json.loads(line) for line in cluster.log("router").splitlines() if request_id in line]
    (line,) = [line for line in lines if line["logger"] == "router.observation.access_log"]
    assert (line["path"], line["status"], line["trace_id"]) == ("/v1/completions", 200, TRACE)
    assert line["output_tokens"] == usage["completion_tokens"]
    assert "very prompt" not in json.dumps(lines)
