"""What a launcher asks of the router that it started: its ports, and whether it serves."""

import asyncio
import http.client
import ssl
import time
from collections.abc import Callable
from typing import Any

from kvferry.cluster_spec import ClusterSpec
from runtime.child_process import LaunchError

_READY_POLL_S = 0.1


def ports_of(ready: dict[str, Any]) -> dict[str, int]:
    """The ports that a router's ready line names. Raises LaunchError when they are not there."""
    try:
        return {name: int(ready[name]) for name in ("http_port", "grpc_port", "internal_port")}
    except (KeyError, TypeError, ValueError):
        raise LaunchError(f"the router's ready line names no ports: {ready}") from None


async def wait_serving(spec: ClusterSpec, http_port: int, deadline: float, check: Callable[[], None]) -> None:
    """Ask the router's /ready on this host until it says 200. HTTP offers nothing to wait on, so this polls.

    `check` is called before each question and may raise. Raises LaunchError when it is `deadline` by
    `time.monotonic()`.
    """
    last = "no answer"
    while time.monotonic() < deadline:
        check()
        status, last = await asyncio.to_thread(_get_ready, spec, http_port)
        if status == http.client.OK:
            return
        await asyncio.sleep(_READY_POLL_S)
    raise LaunchError(f"the router did not become ready within {spec.start_timeout_s:g} s (last answer: {last})")


def _get_ready(spec: ClusterSpec, port: int) -> tuple[int, str]:
    connection = http.client.HTTPConnection(spec.local_host, port, timeout=5)
    if spec.http_scheme == "https":
        # Our own child on this host: its certificate is for the names by which others know it.
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        connection = http.client.HTTPSConnection(spec.local_host, port, timeout=5, context=context)
    try:
        connection.request("GET", "/ready")
        answer = connection.getresponse()
        return answer.status, f"{answer.status} {answer.read(500).decode(errors='replace')}"
    except (OSError, http.client.HTTPException) as error:
        return 0, str(error) or type(error).__name__
    finally:
        connection.close()
