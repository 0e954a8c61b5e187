"""The one failure type that crosses module and process borders, and its HTTP and gRPC faces."""

from contextlib import suppress
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from kvferry_rpc import common_pb2
from kvferry_rpc.common_pb2 import ErrorCode

__all__ = ["ERROR_METADATA_KEY", "ErrorCode", "KvferryError", "invalid"]

_STATUS: dict["ErrorCode.ValueType", tuple[int, grpc.StatusCode]] = {
    ErrorCode.INVALID_REQUEST: (400, grpc.StatusCode.INVALID_ARGUMENT),
    ErrorCode.CONTEXT_LENGTH_EXCEEDED: (400, grpc.StatusCode.INVALID_ARGUMENT),
    ErrorCode.UNKNOWN_MODEL: (404, grpc.StatusCode.NOT_FOUND),
    ErrorCode.OVERLOADED: (429, grpc.StatusCode.RESOURCE_EXHAUSTED),
    ErrorCode.UNAVAILABLE: (503, grpc.StatusCode.UNAVAILABLE),
    ErrorCode.DEADLINE_EXCEEDED: (504, grpc.StatusCode.DEADLINE_EXCEEDED),
    ErrorCode.CANCELLED: (499, grpc.StatusCode.CANCELLED),
    ErrorCode.HANDOFF_FAILED: (502, grpc.StatusCode.ABORTED),
    ErrorCode.INTERNAL: (500, grpc.StatusCode.INTERNAL),
    ErrorCode.UNAUTHENTICATED: (401, grpc.StatusCode.UNAUTHENTICATED),
}

_MAX_MESSAGE_CHARS = 2000
# Their messages say what is wrong with a field, and may quote it.
_CLIENTS_FAULT = (ErrorCode.INVALID_REQUEST, ErrorCode.CONTEXT_LENGTH_EXCEEDED, ErrorCode.UNKNOWN_MODEL)
# gRPC itself refuses such messages, with the status of an overload; but a retry cannot help.
_TOO_LARGE = "message larger than max"

ERROR_METADATA_KEY = "kvferry-error-bin"
"""Trailing metadata of a failed public call: the serialised Error, which says more than a gRPC status can."""


class KvferryError(Exception):
    """A failure that a caller can act on.

    `code` says what kind it is, `field` names the request field at fault (or is empty), and
    `retry_after_ms` is positive when a retry is worth it after that time.
    """

    def __init__(self, code: "ErrorCode.ValueType", message: str, *, field: str = "", retry_after_ms: int = 0) -> None:
        super().__init__(message)
        self.code = code
        self.message = message[:_MAX_MESSAGE_CHARS]
        self.field = field
        self.retry_after_ms = retry_after_ms

    def __reduce__(self) -> tuple[object, ...]:
        # Without this an error could not come back from a process that this one started.
        return _rebuild, (self.code, self.message, self.field, self.retry_after_ms)

    @property
    def code_name(self) -> str:
        """The code in lower case, as in logs and metrics: `handoff_failed`."""
        return common_pb2.ErrorCode.Name(self.code).lower()

    @property
    def log_text(self) -> str:
        """The error for a log line, or for another process that may log it. Of what a client did wrong only the code
        and the field: the message is for the client, whose text it may quote."""
        return f"{self.code_name}: {self.field if self.code in _CLIENTS_FAULT else self.message}"

    @property
    def http_status(self) -> int:
        """Status of an HTTP answer that carries this error."""
        return _STATUS[self.code][0]

    @property
    def grpc_status(self) -> grpc.StatusCode:
        """Status of a gRPC call that ends with this error."""
        return _STATUS[self.code][1]

    def to_proto(self) -> common_pb2.Error:
        """The error as it travels between processes."""
        return common_pb2.Error(
            code=self.code, message=self.message, field=self.field, retry_after_ms=self.retry_after_ms
        )

    @classmethod
    def from_proto(cls, error: common_pb2.Error) -> "KvferryError":
        """The error a peer sent. A code this version does not know counts as INTERNAL."""
        code = error.code if error.code in _STATUS else ErrorCode.INTERNAL
        return cls(code, error.message, field=error.field, retry_after_ms=error.retry_after_ms)

    @classmethod
    def from_rpc(cls, error: grpc.RpcError, peer: str) -> "KvferryError":
        """What a broken or refused call to `peer` means to a request.

        The Error that a kvferry server sent along, if there is one; otherwise every gRPC status maps to one code.
        """
        # An AioRpcError has a status like a Call, without being one.
        answered = isinstance(error, grpc.Call | grpc.aio.AioRpcError)
        trailing: Any = (error.trailing_metadata() if answered else None) or ()
        sent_along = dict(trailing).get(ERROR_METADATA_KEY)
        if isinstance(sent_along, bytes):
            with suppress(DecodeError):
                return cls.from_proto(common_pb2.Error.FromString(sent_along))
        status = error.code() if answered else grpc.StatusCode.UNKNOWN
        detail = (error.details() if answered else None) or str(status)
        if status is grpc.StatusCode.RESOURCE_EXHAUSTED and _TOO_LARGE in detail:
            return cls(ErrorCode.INVALID_REQUEST, f"{peer}: {detail}")
        for code, (_, candidate) in _STATUS.items():
            if candidate is status:
                return cls(code, f"{peer}: {detail}")
        return cls(ErrorCode.INTERNAL, f"{peer}: {detail}")


def _rebuild(code: "ErrorCode.ValueType", message: str, field: str, retry_after_ms: int) -> KvferryError:
    return KvferryError(code, message, field=field, retry_after_ms=retry_after_ms)


def invalid(field: str, message: str) -> KvferryError:
    """Shorthand for a refused field; `message` completes the sentence `field ...`."""
    return KvferryError(ErrorCode.INVALID_REQUEST, f"{field} {message}", field=field)
