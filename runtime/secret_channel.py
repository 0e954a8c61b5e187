"""A channel that adds fixed metadata to every call.

Client interceptors would do the same, but in grpc.aio they put a task and a queue between the caller and every
streamed message; here the call underneath is the plain one.
"""

from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import grpc

_Pairs = tuple[tuple[str, str | bytes], ...]


class SecretChannel(grpc.aio.Channel):
    """Delegates to `inner` and adds `extra` metadata to each call, after the caller's own."""

    def __init__(self, inner: grpc.aio.Channel, extra: _Pairs) -> None:
        self._inner = inner
        self._extra = extra

    def unary_unary(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return _with_metadata(self._inner.unary_unary(method, *args, **kwargs), self._extra)

    def unary_stream(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return _with_metadata(self._inner.unary_stream(method, *args, **kwargs), self._extra)

    def stream_unary(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return _with_metadata(self._inner.stream_unary(method, *args, **kwargs), self._extra)

    def stream_stream(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return _with_metadata(self._inner.stream_stream(method, *args, **kwargs), self._extra)

    async def close(self, grace: float | None = None) -> None:
        await self._inner.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._inner.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._inner.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._inner.channel_ready()

    async def __aenter__(self) -> Self:
        await self._inner.__aenter__()
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc_val: BaseException | None, exc_tb: TracebackType | None
    ) -> bool | None:
        return await self._inner.__aexit__(exc_type, exc_val, exc_tb)


def _with_metadata(invoke: Callable[..., Any], extra: _Pairs) -> Callable[..., Any]:
    def call(*args: Any, metadata: Any = None, **kwargs: Any) -> Any:
        return invoke(*args, metadata=(*(metadata or ()), *extra), **kwargs)

    return call
