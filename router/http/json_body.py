"""From the bytes of a request to a typed struct: bounded, strict, and every refusal names its field.

A body is decoded straight into its type, so nothing is built from unknown fields or from nesting deeper than the type.
"""

import asyncio
import json
import re
import zlib
from typing import Any, TypeVar

import msgspec
from starlette.datastructures import Headers

from kvferry_rpc.common_pb2 import ErrorCode
from router.http.asgi import Receive
from router.http.errors import ClientGone, HttpError
from runtime.errors import KvferryError, invalid
from runtime.limits import MAX_BODY_BYTES

T = TypeVar("T")

BODY_TIMEOUT_S = 30.0
# Bytes of bodies that this process holds at once; beyond it new ones are refused.
MAX_BUFFERED_BYTES = 256 * 1024 * 1024
# Parsing more than this takes long enough that other streams should get a turn in between.
LARGE_BODY_BYTES = 128 * 1024

_GZIP_BITS = 16 + zlib.MAX_WBITS
_AT_PATH = " - at `$"
_NAMED_FIELD = re.compile(r"^Object (?P<problem>contains unknown|missing required) field `(?P<name>.*)`$", re.DOTALL)


class BodyReader:
    """Reads request bodies within a bound for each and one for all together. Event-loop tasks only."""

    def __init__(self, *, max_bytes: int = MAX_BODY_BYTES, timeout_s: float = BODY_TIMEOUT_S) -> None:
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._held_bytes = 0

    async def read(self, headers: Headers, receive: Receive) -> bytes:
        """The whole body. Raises HttpError (408, 413, 415, 429), and ClientGone when the client leaves meanwhile."""
        _check_content_type(headers)
        expansion = _expansion(headers)
        declared = headers.get("content-length", "")
        if declared.isdecimal() and int(declared[:20]) > self._max_bytes:
            raise self._too_large()
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._collect(receive, expansion)
        except TimeoutError:
            raise HttpError(408, "The request body did not arrive in time.", code="request_timeout") from None

    async def _collect(self, receive: Receive, expansion: "Expansion | None") -> bytes:
        parts: list[bytes] = []
        sent = size = 0
        try:
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                part = message.get("body", b"")
                sent += len(part)
                if expansion is not None:
                    # One byte more than may be, so that too large a body is told from the largest.
                    part = expansion.push(part, self._max_bytes + 1 - size)
                size += len(part)
                self._held_bytes += len(part)
                if max(sent, size) > self._max_bytes:
                    raise self._too_large()
                if self._held_bytes > MAX_BUFFERED_BYTES:
                    raise _too_many()
                parts.append(part)
                if not message.get("more_body", False):
                    if expansion is not None:
                        expansion.finish()
                    return b"".join(parts)
        finally:
            self._held_bytes -= size

    def _too_large(self) -> HttpError:
        return HttpError(413, f"The request body exceeds the limit of {self._max_bytes} bytes.", code="body_too_large")


async def decode_body(body: bytes, kind: type[T]) -> T:
    """`decode`, in a thread when the body is large, so that probes and streams go on. Raises KvferryError."""
    if len(body) > LARGE_BODY_BYTES:
        return await asyncio.to_thread(decode, body, kind)
    return decode(body, kind)


def decode(body: bytes, kind: type[T]) -> T:
    """One JSON object as a struct of type `kind`. Raises KvferryError (INVALID_REQUEST) naming the field.

    Floats may come out as NaN or infinite: whoever checks their range refuses those by name too.
    """
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _refusal(str(error)) from None
    except RecursionError:
        raise KvferryError(ErrorCode.INVALID_REQUEST, "The body is nested too deeply.") from None
    except msgspec.DecodeError as error:
        malformed = f"The body is not valid JSON: {error}."
    if len(body) > LARGE_BODY_BYTES:
        raise KvferryError(ErrorCode.INVALID_REQUEST, malformed)
    return _decode_leniently(body, kind, malformed)


class Expansion:
    """A compressed body on its way: never more is expanded than is asked for, whatever the ratio."""

    def __init__(self, encoding: str) -> None:
        """`encoding` is gzip or deflate."""
        self._encoding = encoding
        # deflate is what zlib writes (RFC 9110), gzip has a header of its own.
        self._zlib = zlib.decompressobj(wbits=_GZIP_BITS if encoding == "gzip" else zlib.MAX_WBITS)

    def push(self, data: bytes, max_bytes: int) -> bytes:
        """Expand the next piece, to at most `max_bytes` (1 or more). What is over stays behind: whoever gets as much as
        it asked for has got too much. Raises HttpError (400)."""
        try:
            expanded = self._zlib.decompress(data, max_bytes)
        except zlib.error:
            raise self._malformed() from None
        if self._zlib.unused_data:
            raise self._malformed()
        return expanded

    def finish(self) -> None:
        """Nothing more comes. Raises HttpError (400) when the stream is not whole."""
        if not self._zlib.eof:
            raise self._malformed()

    def _malformed(self) -> HttpError:
        return HttpError(400, f"The body is not one whole {self._encoding} stream.", code="invalid_request")


def _expansion(headers: Headers) -> Expansion | None:
    """What undoes the body's encoding; None when it has none. Raises HttpError (415)."""
    encoding = ",".join(headers.getlist("content-encoding")).strip().lower() or "identity"
    if encoding == "identity":
        return None
    if encoding not in ("gzip", "deflate"):
        raise HttpError(
            415,
            "The body's content-encoding must be gzip, deflate or identity, one of them once.",
            code="unsupported_media",
            headers={"accept-encoding": "gzip, deflate, identity"},
        )
    return Expansion(encoding)


def _too_many() -> HttpError:
    return HttpError(
        429,
        "Too many large requests are arriving at once.",
        code="overloaded",
        kind="rate_limit_error",
        headers={"retry-after": "1"},
    )


def _check_content_type(headers: Headers) -> None:
    media_type, _, parameters = headers.get("content-type", "").partition(";")
    charset = parameters.strip().lower().removeprefix("charset=").strip('"')
    if media_type.strip().lower() != "application/json" or charset not in ("", "utf-8"):
        raise HttpError(415, "The body must be application/json in UTF-8.", code="unsupported_media")


def _decode_leniently(body: bytes, kind: type[T], malformed: str) -> T:
    """Python's own parser lets NaN, Infinity and halves of surrogate pairs through, so that the field at fault can be
    named. What even it cannot read is `malformed`."""
    try:
        document = json.loads(body.decode())
        if isinstance(document, dict):
            for name, value in document.items():
                _check_surrogates(name, value)
        return msgspec.convert(document, kind)
    except msgspec.ValidationError as error:
        raise _refusal(str(error)) from None
    except (ValueError, RecursionError):
        raise KvferryError(ErrorCode.INVALID_REQUEST, malformed) from None


def _check_surrogates(name: str, value: Any) -> None:
    try:
        json.dumps([name, value], ensure_ascii=False).encode()
    except UnicodeEncodeError:
        field = name.encode("utf-8", "replace").decode()
        raise invalid(field, "holds half of a surrogate pair, which is not text") from None


def convert(field: str, value: Any, kind: Any) -> Any:
    """A part of a decoded body, at `field` of it, as a value of type `kind`. Raises KvferryError (INVALID_REQUEST)."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise _refusal(str(error), field) from None


def _refusal(problem: str, at: str = "") -> KvferryError:
    """msgspec's sentence as ours: `Expected ..., got ... - at `$.messages[0].role`` becomes a field and a reason.
    `at` is the field that `$` stands for."""
    path = at
    # Not a regular expression: the names in here are the client's, who could make one take quadratic time.
    before, mark, behind = problem.rpartition(_AT_PATH)
    if mark and behind.endswith("`"):
        problem = before
        path = (at + behind[:-1].replace("[...]", "")).lstrip(".")
    if match := _NAMED_FIELD.match(problem):
        path = f"{path}.{match['name']}".lstrip(".")
        missing = match["problem"].startswith("missing")
        return invalid(path, "is required" if missing else "is not a field that this server supports")
    if problem.startswith("Expected `null`, got"):
        return invalid(path, "is not supported by this server")
    reason = f"is not valid: {problem[0].lower()}{problem[1:]}"
    return invalid(path, reason) if path else KvferryError(ErrorCode.INVALID_REQUEST, f"The body {reason}.")
