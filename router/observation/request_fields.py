"""What everybody who shows a request as JSON says of it: `/debug/requests` and the live page."""

from typing import Any

from router.observation.live_requests import RequestView


def request_fields(view: RequestView) -> dict[str, Any]:
    """Names and counts. Times and phases each shows in a form of its own."""
    return {
        "id": view.request_id,
        "endpoint": view.endpoint,
        "waits_for": view.waits_for,
        "attempt": view.attempt,
        "prefill_worker": view.prefill_worker,
        "decode_worker": view.decode_worker,
        "prompt_tokens": view.prompt_tokens,
        "cached_tokens": view.cached_tokens,
        "output_tokens": view.output_tokens,
        "max_tokens": view.max_tokens,
        "error": view.error,
    }
