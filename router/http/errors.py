"""Failures as HTTP answers: one shape for all of them, that of OpenAI's API."""

import logging
import math
from collections.abc import Mapping

import orjson

from kvferry_rpc.common_pb2 import ErrorCode
from runtime.errors import KvferryError
from runtime.telemetry import describe_defect

logger = logging.getLogger(__name__)

_TYPES = {
    ErrorCode.UNAUTHENTICATED: "authentication_error",
    ErrorCode.OVERLOADED: "rate_limit_error",
    ErrorCode.UNAVAILABLE: "service_unavailable_error",
}
_DEFAULT_RETRY_AFTER_S = 1


class HttpError(Exception):
    """An answer other than success, ready to send.

    `param` names the field at fault or is empty; `code` is a stable word for programs.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str,
        param: str = "",
        kind: str = "",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.kind = kind or ("invalid_request_error" if status < 500 else "server_error")
        self.headers = dict(headers or {})

    def body(self) -> bytes:
        """The JSON object to send, also as the data of an event when the status has already gone."""
        error = {"message": self.message, "type": self.kind, "param": self.param or None, "code": self.code}
        return orjson.dumps({"error": error})


class ClientGone(Exception):
    """The client closed its connection: there is nobody to answer."""


def http_error(error: KvferryError) -> HttpError:
    """How a failure of the cluster looks over HTTP. 429 and 503 always say when to come back."""
    headers = {"www-authenticate": "Bearer"} if error.code == ErrorCode.UNAUTHENTICATED else {}
    if error.code in (ErrorCode.OVERLOADED, ErrorCode.UNAVAILABLE):
        retry_after_s = math.ceil(error.retry_after_ms / 1000) or _DEFAULT_RETRY_AFTER_S
        headers["retry-after"] = str(retry_after_s)
    return HttpError(
        error.http_status,
        error.message,
        code="model_not_found" if error.code == ErrorCode.UNKNOWN_MODEL else error.code_name,
        param=error.field,
        kind=_TYPES.get(error.code, ""),
        headers=headers,
    )


def to_http_error(error: Exception) -> HttpError:
    """Any failure as an answer; a defect is logged."""
    if isinstance(error, HttpError):
        return error
    if isinstance(error, KvferryError):
        return http_error(error)
    log_defect(error)
    return HttpError(500, "The server met an internal error.", code="internal")


def log_defect(error: Exception) -> None:
    """An exception that nobody foresaw."""
    logger.error("a request met an unexpected %s", describe_defect(error))
