"""The one failure type: its faces, and how it survives a wire and a process border."""

import pickle

import grpc
import pytest

from kvferry_rpc import common_pb2
from kvferry_rpc.common_pb2 import ErrorCode
from runtime.errors import ERROR_METADATA_KEY, KvferryError, invalid


def _rpc_error(code: grpc.StatusCode, details: str, *trailing: tuple[str, str | bytes]) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailing), details)


@pytest.mark.parametrize("code", [value for value in ErrorCode.values() if value])
def test_every_code_has_a_name_an_http_and_a_grpc_status(code: "ErrorCode.ValueType") -> None:
    error = KvferryError(code, "why")
    assert error.code_name == ErrorCode.Name(code).lower()
    assert 400 <= error.http_status < 600
    assert error.grpc_status is not grpc.StatusCode.OK


def test_an_error_is_the_same_after_the_wire_and_after_another_process() -> None:
    error = KvferryError(ErrorCode.OVERLOADED, "full", field="n", retry_after_ms=70)
    for copy in (KvferryError.from_proto(error.to_proto()), pickle.loads(pickle.dumps(error))):  # noqa: S301
        assert (copy.code, copy.message, copy.field, copy.retry_after_ms) == (ErrorCode.OVERLOADED, "full", "n", 70)


def test_a_code_of_a_newer_version_counts_as_internal() -> None:
    assert KvferryError.from_proto(common_pb2.Error(code=999, message="new")).code == ErrorCode.INTERNAL  # type: ignore[arg-type]


def test_a_failed_call_keeps_the_error_that_the_server_sent_along() -> None:
    sent = KvferryError(ErrorCode.CONTEXT_LENGTH_EXCEEDED, "too long", field="prompt")
    trailing = (ERROR_METADATA_KEY, sent.to_proto().SerializeToString())
    error = KvferryError.from_rpc(_rpc_error(grpc.StatusCode.INVALID_ARGUMENT, "too long", trailing), "the router")
    assert (error.code, error.message, error.field) == (ErrorCode.CONTEXT_LENGTH_EXCEEDED, "too long", "prompt")


@pytest.mark.parametrize("trailing", [(), ((ERROR_METADATA_KEY, b"\xff\xff"),)])
def test_a_failed_call_without_a_readable_error_is_known_by_its_status(trailing: tuple[tuple[str, bytes], ...]) -> None:
    error = KvferryError.from_rpc(_rpc_error(grpc.StatusCode.UNAVAILABLE, "gone", *trailing), "decode-0")
    assert error.code == ErrorCode.UNAVAILABLE
    assert "decode-0" in error.message
    assert "gone" in error.message


@pytest.mark.parametrize("side", ["Sent", "Received"])
def test_a_message_that_is_too_large_is_no_overload(side: str) -> None:
    refusal = _rpc_error(grpc.StatusCode.RESOURCE_EXHAUSTED, f"SERVER: {side} message larger than max (9 vs. 8)")
    assert KvferryError.from_rpc(refusal, "the router").code == ErrorCode.INVALID_REQUEST
    full = _rpc_error(grpc.StatusCode.RESOURCE_EXHAUSTED, "Concurrent RPC limit exceeded!")
    assert KvferryError.from_rpc(full, "the router").code == ErrorCode.OVERLOADED


def test_an_error_that_names_no_status_is_internal() -> None:
    assert KvferryError.from_rpc(grpc.RpcError(), "decode-0").code == ErrorCode.INTERNAL


def test_a_refused_field_is_named_in_the_message() -> None:
    error = invalid("top_p", "must be in (0, 1]")
    assert (error.code, error.field, str(error)) == (ErrorCode.INVALID_REQUEST, "top_p", "top_p must be in (0, 1]")


def test_what_a_client_did_wrong_is_logged_without_its_words() -> None:
    assert invalid("stop", "is 'a secret'").log_text == "invalid_request: stop"
    assert KvferryError(ErrorCode.HANDOFF_FAILED, "block 3 differs").log_text == "handoff_failed: block 3 differs"
