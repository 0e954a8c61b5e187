"""A cluster with API keys, HTTPS and mutual TLS, from outside: who is let in, what is shared, what is logged."""

import asyncio
import hashlib
import json
import ssl
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from kvferry.client import Client, text_request
from kvferry.run_dir import live_state
from kvferry_rpc.common_pb2 import ErrorCode, SamplingParams
from kvferry_rpc.internal_pb2 import PrefillRequest
from kvferry_rpc.internal_pb2_grpc import DecodeWorkerStub, MembershipStub, PrefillWorkerStub
from kvferry_rpc.public_pb2 import ChatMessage, ChatPrompt, GenerateRequest
from runtime.clock import SystemClock
from runtime.errors import KvferryError
from runtime.grpc_life import channel
from runtime.secret import read_secret_file
from runtime.tls import ChannelTls, TlsFiles
from tests.support.certificates import Authority
from tests.support.live_cluster import LiveCluster, live_cluster

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]
MODEL = "tiny-real"
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MARK = "xyzzyMARKplugh"
KEYS = {"red": "kvf-red-key-for-a-test", "blue": "kvf-blue-key-for-a-test"}


class Site:
    """The cluster, and clients of it."""

    def __init__(self, directory: Path) -> None:
        authority = Authority.create()
        self.ca = authority.write_own(directory)
        self.server = authority.write(directory, "server")
        self.client = TlsFiles(*authority.write(directory, "client", ()), self.ca)
        self.trust = ssl.create_default_context(cafile=str(self.ca))
        self.keys = directory / "keys"
        self.write_keys("red", "blue")
        self.flags = (
            *("--api-keys-file", str(self.keys), "--protect-metrics"),
            *("--tls-cert-file", str(self.server[0]), "--tls-key-file", str(self.server[1])),
            *("--tls-client-ca-file", str(self.ca)),
            *("--internal-tls-cert-file", str(self.server[0]), "--internal-tls-key-file", str(self.server[1])),
            *("--internal-tls-ca-file", str(self.ca)),
            *("--num-blocks", "256", "--no-restart", "--log-level", "debug"),
        )
        self.cluster: LiveCluster

    def write_keys(self, *tenants: str) -> None:
        digests = {name: hashlib.sha256(KEYS[name].encode()).hexdigest() for name in tenants}
        lines = [json.dumps({"tenant": name, "key_sha256": digest}) for name, digest in digests.items()]
        new = self.keys.with_suffix(".new")
        new.write_text("\n".join(lines))
        new.rename(self.keys)

    def http(self, tenant: str = "") -> httpx.Client:
        headers = {"authorization": f"Bearer {KEYS[tenant]}"} if tenant else {}
        return httpx.Client(base_url=f"https://{self.cluster.http}", verify=self.trust, headers=headers, timeout=60)

    def grpc(self, tenant: str = "red", tls: TlsFiles | None = None) -> Client:
        return Client(self.cluster.grpc, tls=tls or self.client, api_key=KEYS[tenant])

    def cached(self, tenant: str, prompt: str, **fields: Any) -> int:
        """Prompt tokens that nobody computed for it."""
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 2, "temperature": 0, **fields}
        with self.http(tenant) as client:
            answer = client.post(COMPLETIONS, json=body)
        assert answer.status_code == 200, answer.text
        # The next request finds blocks only once those of this one are known to be cached.
        self.cluster.wait_at_rest()
        return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    directory = tmp_path_factory.mktemp("site")
    site = Site(directory)
    with live_cluster(directory, *site.flags) as cluster:
        cluster.client_options = {"tls": site.client, "api_key": KEYS["red"]}
        site.cluster = cluster
        yield site


def test_https_serves_whoever_has_a_key_and_probes_without_one(site: Site) -> None:
    with site.http() as stranger, site.http("blue") as tenant:
        assert stranger.get("/health").status_code == 200
        assert stranger.get("/ready").status_code == 200
        assert [stranger.get(path).status_code for path in ("/v1/models", "/metrics")] == [401, 401]
        assert [tenant.get(path).status_code for path in ("/v1/models", "/metrics")] == [200, 200]
    with httpx.Client(base_url=f"https://{site.cluster.http}") as distrustful, pytest.raises(httpx.ConnectError):
        distrustful.get("/health")


def test_grpc_serves_those_with_a_certificate_and_a_key(site: Site) -> None:
    with site.grpc() as client:
        assert client.default_model() == MODEL
        parts = list(client.generate(text_request(MODEL, "Once upon", SamplingParams(max_tokens=4))))
        assert parts[-1].finish.completion_tokens == 4
    strangers = [
        (Client(site.cluster.grpc, tls=TlsFiles(ca_file=site.ca), api_key=KEYS["red"]), ErrorCode.UNAVAILABLE),
        (Client(site.cluster.grpc, api_key=KEYS["red"]), ErrorCode.UNAVAILABLE),
        (Client(site.cluster.grpc, tls=site.client), ErrorCode.UNAUTHENTICATED),
        (Client(site.cluster.grpc, tls=site.client, api_key="wrong"), ErrorCode.UNAUTHENTICATED),
    ]
    for stranger, code in strangers:
        with stranger, pytest.raises(KvferryError) as caught:
            stranger.models()
        assert caught.value.code == code


def test_two_tenants_share_no_block_of_the_same_prompt(site: Site) -> None:
    prompt = "The harbour lay quiet under the first light of the morning, and nobody was about. " * 4
    assert site.cached("red", prompt) == 0
    assert site.cached("red", prompt) > 0
    assert site.cached("blue", prompt) == 0
    assert site.cached("blue", prompt) > 0
    # A salt of the client's own splits further, and leads to nobody else's blocks.
    assert site.cached("red", prompt, cache_salt="s") == 0
    assert site.cached("red", prompt, cache_salt="s") > 0
    assert site.cached("blue", prompt, cache_salt="s") == 0
    with site.grpc("red") as client:
        parts = list(client.generate(text_request(MODEL, prompt, SamplingParams(max_tokens=2))))
    assert parts[-1].finish.cached_tokens > 0


def test_a_receipt_is_for_the_tenant_who_asked(site: Site) -> None:
    with site.http("red") as red, site.http("blue") as blue:
        answer = red.post(COMPLETIONS, json={"model": MODEL, "prompt": "Once", "max_tokens": 2})
        path = f"/v1/receipts/{answer.headers['x-request-id']}"
        assert red.get(path).status_code == 200
        assert blue.get(path).status_code == 404
    site.cluster.wait_at_rest()


async def test_internal_ports_open_only_with_a_certificate_and_the_cluster_secret(site: Site) -> None:
    state = live_state(site.cluster.state_dir)
    assert state is not None
    secret = read_secret_file(Path(state["secret_file"]))
    router = next(process for process in state["processes"] if process["name"] == "router")
    addresses = {worker.role: worker.address for worker in site.cluster.state().workers}
    targets = [
        (f"127.0.0.1:{router['internal_port']}", lambda link: MembershipStub(link).Attach()),
        (addresses["decode"], lambda link: DecodeWorkerStub(link).Session()),
        (addresses["prefill"], lambda link: PrefillWorkerStub(link).Prefill(PrefillRequest())),
    ]
    ours = ChannelTls(site.client, SystemClock())
    without = ChannelTls(TlsFiles(ca_file=site.ca), SystemClock())
    for address, call in targets:
        for tls, shown, code in (
            (ours, None, grpc.StatusCode.UNAUTHENTICATED),
            (ours, b"another secret of a cluster", grpc.StatusCode.UNAUTHENTICATED),
            (without, secret, grpc.StatusCode.UNAVAILABLE),
            (None, secret, grpc.StatusCode.UNAVAILABLE),
        ):
            async with channel(address, shown, tls=tls) as link, asyncio.timeout(30):
                assert await call(link).code() is code


def bad_requests() -> list[tuple[str, dict[str, Any] | bytes]]:
    """Requests that are refused, each with the mark where a client's own text stands."""
    messages = [{"role": "user", "content": MARK}]
    schema = {"type": "object", "properties": {MARK: {"not": {"const": MARK}}}}
    return [
        (CHAT, {"model": MODEL, "messages": [{"role": "wibble", "content": MARK}]}),
        (CHAT, {"model": MODEL, "messages": [{"role": "user", "content": [{"type": "image_url", "url": MARK}]}]}),
        (CHAT, {"model": MODEL, "messages": messages, "temperature": MARK}),
        (CHAT, {"model": MODEL, "messages": messages, "max_tokens": 10**6}),
        (CHAT, {"model": MODEL, "messages": messages, "stop": [MARK * 100]}),
        (CHAT, {"model": MODEL, "messages": messages, MARK: 1}),
        (CHAT, {"model": MARK, "messages": messages}),
        (CHAT, {"model": MODEL, "messages": messages, "structured_outputs": {"json": schema}}),
        (COMPLETIONS, {"model": MODEL, "prompt": f"{MARK} " * 20_000}),
        (COMPLETIONS, {"model": MODEL, "prompt": [MARK, 5]}),
        (COMPLETIONS, {"model": MODEL, "prompt": MARK, "logit_bias": {MARK: 1}}),
        (COMPLETIONS, f'{{"model": "{MODEL}", "prompt": "{MARK}'.encode()),
        (COMPLETIONS, f'{{"model": "{MODEL}", "prompt": "{MARK} \\ud800"}}'.encode()),
    ]


def test_no_log_at_any_level_has_a_prompt_an_answer_or_a_key(site: Site) -> None:
    good = {
        "model": MODEL,
        "messages": [{"role": "user", "content": MARK}],
        "max_tokens": 4,
        "stop": MARK,
        "user": MARK,
    }
    with site.http("red") as client:
        for path, body in bad_requests():
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            answer = client.post(path, content=content, headers={"content-type": "application/json"})
            assert 400 <= answer.status_code < 500, (answer.status_code, answer.text)
        assert client.post(CHAT, json=good).status_code == 200
        assert b"[DONE]" in client.post(CHAT, json={**good, "stream": True, "cache_salt": MARK}).content
        assert client.post("/tokenize", json={"prompt": MARK}).status_code == 200
        assert client.get("/v1/models", headers={"authorization": f"Bearer {MARK}"}).status_code == 401
    chat = ChatPrompt(messages=[ChatMessage(role="wibble", content=MARK)])
    with site.grpc() as rpc:
        assert list(rpc.generate(text_request(MODEL, MARK, SamplingParams(max_tokens=4))))
        for bad in (GenerateRequest(model=MODEL, chat=chat), GenerateRequest(model=MODEL, text=MARK, stop=[MARK * 99])):
            with pytest.raises(KvferryError):
                list(rpc.generate(bad))
    site.cluster.wait_at_rest()
    logs = {path.stem: path.read_text() for path in (site.cluster.state_dir / "logs").iterdir()}
    assert set(logs) == {"router", "prefill-0", "decode-0"}
    assert "DEBUG" in logs["router"]
    for name, log in logs.items():
        for secret in (MARK, *KEYS.values(), "harbour lay quiet"):
            assert secret not in log, f"{name} logs what clients send"


def test_a_key_taken_out_of_the_file_opens_nothing_any_more(site: Site) -> None:
    site.write_keys("red")
    deadline = time.monotonic() + 30
    with site.http("blue") as blue, site.http("red") as red:
        while blue.get("/v1/models").status_code != 401:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert red.get("/v1/models").status_code == 200
