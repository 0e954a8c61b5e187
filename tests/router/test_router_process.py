"""`python -m router` as a real process: its ready line, its doors, its drain."""

import asyncio
import signal
import sys
from pathlib import Path

import httpx
import pytest

from kvferry_rpc import public_pb2, public_pb2_grpc
from router.config import RouterConfig
from runtime.config import parse_config
from runtime.grpc_life import channel
from tests.support.fake_model import continuation
from tests.support.fake_workers import Fabric, FakeDecode, FakePrefill
from tests.support.router_process import ROOT, RouterProcess, attached, router


def body(**fields: object) -> dict[str, object]:
    return {"model": "tiny", "prompt": list(range(1, 30)), "max_tokens": 8, "temperature": 0, **fields}


@pytest.mark.e2e
async def test_a_router_serves_drains_and_exits(tmp_path: Path) -> None:
    # H096, H095
    fabric = Fabric()
    decode, prefill = FakeDecode("decode-0", fabric), FakePrefill("prefill-0", fabric)
    async with router(tmp_path) as running, httpx.AsyncClient(base_url=running.url, timeout=15) as http:
        assert (await http.get("/health")).status_code == 200
        assert (await http.get("/ready")).status_code == 503
        assert (await http.post("/v1/completions", json=body())).status_code == 503
        async with attached(running, decode, prefill):
            assert (await http.get("/ready")).status_code == 200
            answer = (await http.post("/v1/completions", json=body(kv_receipt=True, ignore_eos=True))).json()
            assert answer["usage"]["completion_tokens"] == 8
            receipt = (await http.get(f"/v1/receipts/{answer['id']}")).json()
            assert receipt["transport"] == "tcp"
            await _ask_over_grpc(running)
            metrics = (await http.get("/metrics")).text
            assert 'kvferry_requests_ended_total{outcome="ok"} 2.0' in metrics

            decode.pause_after = 3
            streams = [asyncio.create_task(http.post("/v1/completions", json=body())) for _ in range(4)]
            await decode.until(lambda: len(decode.live) == 4)
            running.process.send_signal(signal.SIGTERM)
            while (await http.get("/ready")).status_code == 200:  # noqa: ASYNC110 - another process's state
                await asyncio.sleep(0.01)
            assert (await http.get("/health")).status_code == 200
            assert (await http.post("/v1/completions", json=body())).status_code == 503
            assert not any(stream.done() for stream in streams)
            decode.resume.set()
            answers = [(await stream).json() for stream in streams]
            assert [answer["usage"]["completion_tokens"] for answer in answers] == [8] * 4
            assert await running.exit_status() == 0


async def _ask_over_grpc(running: RouterProcess) -> None:
    async with channel(f"127.0.0.1:{running.ports['grpc_port']}") as link:
        stub = public_pb2_grpc.KvferryStub(link)
        request = public_pb2.GenerateRequest(model="tiny", tokens=public_pb2.TokenIds(ids=range(1, 30)))
        request.sampling.max_tokens = 8
        tokens = [token.token_id async for part in stub.Generate(request, timeout=15) for token in part.tokens]
        assert tokens == continuation(range(1, 30), 8)
        state = await stub.ClusterState(public_pb2.ClusterStateRequest(), timeout=15)
        assert [worker.worker_id for worker in state.workers] == ["decode-0", "prefill-0"]


@pytest.mark.e2e
async def test_a_second_signal_ends_a_router_that_is_draining(tmp_path: Path) -> None:
    decode = FakeDecode("decode-0", Fabric())
    decode.pause_after = 3
    async with (
        router(tmp_path) as running,
        httpx.AsyncClient(base_url=running.url, timeout=15) as http,
        attached(running, decode),
    ):
        stream = asyncio.create_task(http.post("/v1/completions", json=body()))
        await decode.until(lambda: decode.live)
        running.process.send_signal(signal.SIGTERM)
        while (await http.get("/ready")).status_code == 200:  # noqa: ASYNC110 - another process's state
            await asyncio.sleep(0.01)
        running.process.send_signal(signal.SIGTERM)
        assert await running.exit_status() == 130
        with pytest.raises(httpx.HTTPError):
            await stream
        await decode.until(lambda: not decode.live)


@pytest.mark.e2e
async def test_a_drain_is_bounded_and_what_is_left_is_cancelled_on_the_workers(tmp_path: Path) -> None:
    decode = FakeDecode("decode-0", Fabric())
    decode.pause_after = 3
    async with (
        router(tmp_path, "--drain-timeout-s=0.2") as running,
        httpx.AsyncClient(base_url=running.url, timeout=15) as http,
        attached(running, decode),
    ):
        stream = asyncio.create_task(http.post("/v1/completions", json=body()))
        await decode.until(lambda: decode.live)
        assert running.process.stdin is not None
        running.process.stdin.close()  # The launcher is gone, which counts as a signal.
        assert await running.exit_status() == 0
        await asyncio.gather(stream, return_exceptions=True)
        await decode.until(lambda: not decode.live)


@pytest.mark.e2e
async def test_a_router_that_cannot_start_says_why(tmp_path: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "router", f"--model={tmp_path}", f"--cluster-secret-file={tmp_path / 'none'}",
        stderr=asyncio.subprocess.PIPE, cwd=ROOT,
    )  # fmt: skip
    _, errors = await asyncio.wait_for(process.communicate(), 30)
    assert process.returncode == 1
    assert "none" in errors.decode()
    assert "Traceback" not in errors.decode()


FLAGS = ["--model=models/tiny", "--cluster-secret-file=s"]


def test_the_defaults_are_a_valid_configuration() -> None:
    config = parse_config(RouterConfig, FLAGS)
    assert config.model_name == "tiny"
    assert config.dispatch_limits.max_in_flight == config.max_in_flight
    assert not config.dispatch_limits.strict_handoff
    assert config.dispatch_limits.require_transports == ()


def test_what_must_be_proven_comes_from_the_flags() -> None:
    config = parse_config(RouterConfig, [*FLAGS, "--strict-handoff", "--require-transport=nixl,ucx"])
    assert config.dispatch_limits.strict_handoff
    assert config.dispatch_limits.require_transports == ("nixl", "ucx")


def test_the_forecast_and_the_classes_come_from_the_flags() -> None:
    targets = ["--slo-interactive-ttft-s=0.5", "--slo-interactive-tpot-s=0.05", "--slo-batch-ttft-s=600"]
    limits = parse_config(RouterConfig, [*FLAGS, "--kv-forecast-tokens=64", *targets]).dispatch_limits
    assert limits.forecast_tokens == 64
    interactive, batch = limits.slo_classes
    assert (interactive.name, interactive.ttft_s, interactive.tpot_s) == ("interactive", 0.5, 0.05)
    assert (batch.name, batch.ttft_s) == ("batch", 600.0)


@pytest.mark.parametrize(
    "flags",
    [
        ["--http-port=70000"],
        ["--kv-forecast-tokens=-1"],
        ["--slo-interactive-tpot-s=0"],
        ["--slo-batch-ttft-s=nan"],
        ["--http-port=9000", "--grpc-port=9000"],
        ["--max-in-flight=0"],
        ["--receipts-kept=0"],
        ["--heartbeat-s=0"],
        ["--require-transport=shm,pigeon"],
        ["--drain-timeout-s=-1"],
        ["--served-model-name=" + "x" * 300],
    ],
)
def test_a_bad_flag_is_refused_by_name(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_config(RouterConfig, [*FLAGS, *flags])
    assert flags[0].partition("=")[0] in capsys.readouterr().err
