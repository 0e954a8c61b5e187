"""How long a request may take: what its client says in a header, and never longer than the router allows."""

from starlette.datastructures import Headers

from runtime.errors import invalid

TIMEOUT_HEADER = "x-request-timeout-ms"
_MAX_DIGITS = 12


def deadline_of(headers: Headers, arrived_at: float, request_timeout_s: float) -> float:
    """The deadline on the clock of `arrived_at`, in seconds. Raises KvferryError (INVALID_REQUEST) for a header that
    is no positive whole number."""
    text = headers.get(TIMEOUT_HEADER)
    if text is None:
        return arrived_at + request_timeout_s
    if not (text.isascii() and text.isdecimal() and len(text) <= _MAX_DIGITS and int(text) > 0):
        raise invalid(TIMEOUT_HEADER, "must be a positive whole number of milliseconds")
    return arrived_at + min(request_timeout_s, int(text) / 1000)
