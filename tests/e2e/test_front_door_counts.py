"""What a real cluster counts and bounds: metrics that add up, and the edge of the context."""

import json
from typing import Any

import grpc
import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvferry_rpc import public_pb2, public_pb2_grpc
from kvferry_rpc.common_pb2 import SamplingParams
from tests.support.live_cluster import LiveCluster
from tests.support.raw_http import RawClient

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]
MODEL = "tiny-real"
CONTEXT = 4096


def _samples(cluster: LiveCluster) -> dict[str, float]:
    page = httpx.get(f"{cluster.base_url}/metrics", timeout=30).text
    samples = [sample for family in text_string_to_metric_families(page) for sample in family.samples]
    return {sample.name + "".join(sorted(sample.labels.values())): sample.value for sample in samples}


def _post(cluster: LiveCluster, **fields: Any) -> httpx.Response:
    body = {"model": MODEL, "prompt": [11, 12, 13], "max_tokens": 4, "ignore_eos": True, **fields}
    return httpx.post(f"{cluster.base_url}/v1/completions", json=body, timeout=60)


def _usage(answer: httpx.Response) -> tuple[int, int]:
    """Prompt and completion tokens as the client is told, streamed or not."""
    assert answer.status_code == 200, answer.text
    if answer.headers["content-type"].startswith("text/event-stream"):
        events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
        usage = json.loads(events[-1])["usage"]
    else:
        usage = answer.json()["usage"]
    return usage["prompt_tokens"], usage["completion_tokens"]


def _leave_in_mid_stream(cluster: LiveCluster) -> None:
    client = RawClient(cluster.http)
    client.post(
        "/v1/completions",
        {"model": MODEL, "prompt": [21, 22], "max_tokens": 4000, "ignore_eos": True, "stream": True},
    )
    client.read_until(b"data: ")
    client.leave()


def test_after_good_bad_and_abandoned_requests_the_counts_are_those_of_the_clients(cluster: LiveCluster) -> None:
    cluster.wait_at_rest()
    before = _samples(cluster)
    used = [
        _usage(_post(cluster)),
        _usage(_post(cluster, max_tokens=9)),
        _usage(_post(cluster, stream=True, stream_options={"include_usage": True})),
        _usage(_post(cluster, n=2)),
    ]
    with grpc.insecure_channel(cluster.grpc) as channel:
        sampling = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
        request = public_pb2.GenerateRequest(model=MODEL, text="Hi there", sampling=sampling)
        stub = public_pb2_grpc.KvferryStub(channel)
        finish = list(stub.Generate(request, timeout=60))[-1].finish
        used.append((finish.prompt_tokens, finish.completion_tokens))
        request.sampling.top_p = -1
        with pytest.raises(grpc.RpcError):
            list(stub.Generate(request, timeout=60))
    refusals = [_post(cluster, top_p=7), _post(cluster, model="nothing"), _post(cluster, prompt=[5] * CONTEXT)]
    assert [answer.status_code for answer in refusals] == [400, 404, 400]
    after_answers = _samples(cluster)
    _leave_in_mid_stream(cluster)
    cluster.wait_at_rest()
    after = _samples(cluster)

    def change(name: str, since: dict[str, float] = before) -> float:
        return after[name] - since[name]

    ended = {name: change(f"kvferry_requests_ended_total{name}") for name in ("ok", "cancelled", "rejected", "failed")}
    assert ended == {"ok": 6, "cancelled": 1, "rejected": 4, "failed": 0}
    assert change("kvferry_requests_received_total") == sum(ended.values())
    assert change("kvferry_time_to_first_token_seconds_count") == 6 + 1  # The one who left had got a token.
    assert change("kvferry_e2e_request_latency_seconds_count") == 6
    # The prompt of n=2 is one prompt to its client and two sequences to the cluster.
    assert change("kvferry_prompt_tokens_total") == sum(prompt for prompt, _ in used) + 3
    assert change("kvferry_requests_in_flight", dict.fromkeys(before, 0.0)) == 0
    given = after_answers["kvferry_tokens_generated_total"] - before["kvferry_tokens_generated_total"]
    assert given == sum(completion for _, completion in used) == 4 + 9 + 4 + 8 + 4


@pytest.mark.parametrize("stream", [False, True])
def test_the_context_is_filled_to_its_last_token_and_not_beyond(cluster: LiveCluster, stream: bool) -> None:
    options: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    prompt = [7 + index % 97 for index in range(CONTEXT)]
    for length, max_tokens, allowed in ((CONTEXT - 2, 2, 2), (CONTEXT - 2, None, 2), (CONTEXT - 1, 1, 1)):
        answer = _post(cluster, prompt=prompt[:length], max_tokens=max_tokens, **options)
        assert _usage(answer) == (length, allowed)
        assert '"finish_reason":"length"' in answer.text
    for length, max_tokens in ((CONTEXT - 1, 2), (CONTEXT, 1), (CONTEXT, None), (100_000, 1)):
        answer = _post(cluster, prompt=(prompt * 25)[:length], max_tokens=max_tokens, **options)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
