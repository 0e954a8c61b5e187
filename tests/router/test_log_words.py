"""What a worker says of a client's field, and what a defect says, reaches the client at most, and no log."""

from typing import Any

import pytest

from kvferry_rpc.common_pb2 import Error, ErrorCode
from router.dispatch import attempt
from tests.support.router_cluster import failure_of, router_cluster

MARK = "xyzzyMARKplugh"
QUOTING = Error(
    code=ErrorCode.INVALID_REQUEST,
    field="response_format",
    message=f"response_format cannot be compiled: {MARK}",
)


async def test_a_refusal_that_quotes_the_client_is_told_to_the_client_alone(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    async with router_cluster() as cluster:
        decode, prefill = await cluster.decode(), await cluster.prefill()
        decode.refusals = [QUOTING]
        assert MARK in (await failure_of(cluster.run(cluster.request()))).message
        prefill.failures = [QUOTING]
        assert MARK in (await failure_of(cluster.run(cluster.request()))).message
        decode.fail_after = (2, QUOTING)
        assert MARK in (await failure_of(cluster.run(cluster.request()))).message
        decode.fail_after = None
        prefill.failures_after_commit = [QUOTING]
        await cluster.run(cluster.request())
    assert "no prefill half of the receipt: invalid_request: response_format" in caplog.text
    assert MARK not in caplog.text


async def test_a_defect_in_the_call_for_the_kv_is_logged_by_kind_and_place(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("DEBUG")
    start = attempt.Attempt._start_sending

    def start_badly(self: Any, ticket: Any) -> None:
        async def broken(*_: Any) -> None:
            raise RuntimeError(f"cannot read {MARK}")

        self._send = broken
        start(self, ticket)

    monkeypatch.setattr(attempt.Attempt, "_start_sending", start_badly)
    async with router_cluster() as cluster:
        await cluster.decode()
        await cluster.prefill()
        (line, *_) = (await cluster.run(cluster.request())).end.receipt.earlier_failures
    assert line == "attempt 1: unavailable: the call for the KV failed: RuntimeError"
    assert "broken" in caplog.text
    assert MARK not in caplog.text
