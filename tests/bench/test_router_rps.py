"""The router's benchmark: its mocks, its load and its arithmetic. Other routers are measured by the benchmark alone."""

import io
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from bench.common.harness import BenchmarkError, Options, Report
from bench.common.mock_backend import MockBackend
from bench.common.router_process import BoundProcess, RouterDied
from bench.common.stream_load import Streamed, StreamLoad, Target
from bench.router_rps import Sample, interpreters, percentile
from router.config import RouterConfig
from router.service import RouterService
from router.text.tokenizer import Tokenizer

MODEL_DIR = Path(__file__).parents[1] / "data" / "tiny-real"
SECRET = "a secret of the mock"
WORDS = [" one", " two", " three", " four"]


@asynccontextmanager
async def backend() -> AsyncIterator[tuple[MockBackend, str]]:
    mock = MockBackend()
    tokenizer = Tokenizer.load(MODEL_DIR)
    token_ids = tokenizer.encode("and the sea and", add_special_tokens=False)[:4]
    start = {"command": "start", "secret": SECRET, "token_ids": token_ids, "vocab_size": 4032, "words": WORDS}
    url = (await mock.obey(start))["openai_url"]
    try:
        yield mock, url
    finally:
        await mock.close()


async def loaded(mock: MockBackend, target: Target) -> tuple[list[Streamed], dict[str, list[float]]]:
    load = StreamLoad(target)
    try:
        results = [*await load.at_once(3, 6), *await load.at_rate(500.0, 4)]
    finally:
        await load.close()
    return results, (await mock.obey({"command": "held"}))["held"]


def check(results: list[Streamed], held: dict[str, list[float]]) -> None:
    assert len({one.request_id for one in results}) == len(results) == 10
    for one in results:
        first_held, whole_held = held[one.request_id]
        assert 0.0 <= first_held <= whole_held
        # Both clocks are the same one, and the mock's time lies within the client's.
        assert first_held <= one.first_s
        assert whole_held <= one.whole_s


async def test_the_mock_server_is_asked_and_timed_like_any_router() -> None:
    async with backend() as (mock, url):
        await mock.obey({"command": "pace", "step_s": 0.001})
        target = Target("127.0.0.1", int(url.rpartition(":")[2]), "mock", "hello", 4)
        results, held = await loaded(mock, target)
        check(results, held)
        assert {one.chunks for one in results} == {4}
        assert all(first < whole for first, whole in held.values())


async def test_the_mock_worker_serves_a_real_router(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text(SECRET)
    config = RouterConfig(
        model=MODEL_DIR, cluster_secret_file=tmp_path / "secret", http_port=0, grpc_port=0, internal_port=0
    )
    router = RouterService(config, SECRET.encode(), Tokenizer.load(MODEL_DIR))
    async with backend() as (mock, _):
        try:
            ports = await router.start()
            await mock.obey({"command": "attach", "routers": [f"127.0.0.1:{ports['internal_port']}"]})
            target = Target("127.0.0.1", ports["http_port"], "tiny-real", "hello", 4)
            results, held = await loaded(mock, target)
            check(results, held)
            assert all(1 <= one.chunks <= 4 for one in results)
            with pytest.raises(BaseExceptionGroup) as caught:
                await loaded(mock, Target("127.0.0.1", ports["http_port"], "another", "hello", 4))
            assert caught.group_contains(BenchmarkError, match="404")
        finally:
            await router.stop()


def test_added_time_is_what_the_mock_did_not_take() -> None:
    results = [Streamed(10.0, 10.5, 11.0, 16, "a"), Streamed(20.0, 20.25, 20.5, 16, "b")]
    sample = Sample(results, cpu_s=0.004, held={"a": [0.25, 0.75], "b": [0.125, 0.25]})
    assert sample.added_ms(first=True) == [125.0, 250.0]
    assert sample.added_ms(first=False) == [250.0, 250.0]
    assert sample.cpu_s_per_1000_requests == 2.0
    assert sample.cpu_s_per_1000_chunks == 0.125
    ordered = [float(number) for number in range(100)]
    assert percentile(ordered, 0.5) == 50.0
    assert percentile(ordered, 0.99) == 99.0


def test_a_peer_is_named_with_its_interpreter() -> None:
    assert interpreters(["dynamo=/x/python"])["dynamo"] == "/x/python"
    for entry in ("dynamo", "dynamo=", "nginx=/x"):
        with pytest.raises(ValueError, match="NAME=PYTHON"):
            interpreters([entry])


def test_a_process_that_ends_says_what_it_said_last() -> None:
    script = "import sys; sys.stderr.write('no such module\\n'); sys.exit(3)"
    with (
        BoundProcess("peer", (sys.executable, "-c", script), {0}) as process,
        pytest.raises(RouterDied, match="exit code 3: no such module"),
    ):
        process.wait_for("http://127.0.0.1:9/", 20.0)


def test_what_is_missing_has_a_line() -> None:
    out, err = io.StringIO(), io.StringIO()
    with Report(Options(), out=out, err=err) as report:
        report.missing("dynamo", "it has no environment")
    line: dict[str, Any] = json.loads(out.getvalue())
    assert (line["metric"], line["baseline"]) == ("missing", "dynamo")
