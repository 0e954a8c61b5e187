"""A small Python client of the public gRPC service, synchronous and asyncio.

    with Client("127.0.0.1:8001") as client:
        for part in client.generate(chat_request(client.default_model(), [("user", "Hello")])):
            print(part.text, end="")

Every failure is a KvferryError. Leaving the loop early, or closing the iterator, cancels the generation end to end.
"""

from collections.abc import AsyncGenerator, Generator, Sequence
from types import TracebackType
from typing import Self

import grpc

from kvferry_rpc import public_pb2_grpc
from kvferry_rpc.common_pb2 import ErrorCode, KVReceipt, SamplingParams
from kvferry_rpc.public_pb2 import (
    ChatMessage,
    ChatPrompt,
    ClusterStateRequest,
    ClusterStateResponse,
    GenerateRequest,
    GenerateResponse,
    GetReceiptRequest,
    ListModelsRequest,
    Model,
)
from runtime.errors import KvferryError
from runtime.grpc_life import channel, channel_options

DEFAULT_TIMEOUT_S = 600.0
_QUICK_TIMEOUT_S = 30.0  # calls that compute nothing
# Within the cluster whoever cannot connect tries again at once. Here a call has one try, and a busy router may need
# seconds to greet.
_CONNECT_TIMEOUT_S = 15.0


def chat_request(
    model: str,
    messages: Sequence[tuple[str, str]],
    sampling: SamplingParams | None = None,
    *,
    with_receipt: bool = True,
) -> GenerateRequest:
    """A request for an answer to a conversation of (role, content) pairs."""
    chat = ChatPrompt(messages=[ChatMessage(role=role, content=content) for role, content in messages])
    return GenerateRequest(model=model, chat=chat, sampling=sampling or SamplingParams(), with_receipt=with_receipt)


def text_request(
    model: str, text: str, sampling: SamplingParams | None = None, *, with_receipt: bool = True
) -> GenerateRequest:
    """A request to continue `text`."""
    return GenerateRequest(model=model, text=text, sampling=sampling or SamplingParams(), with_receipt=with_receipt)


class Client:
    """Synchronous client of one router. Threads may share it."""

    def __init__(self, address: str, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """`address` is host:port of the router's gRPC service; `timeout_s` bounds a whole generation."""
        self.address = address
        self._timeout_s = timeout_s
        self._channel = grpc.insecure_channel(address, options=channel_options(connect_timeout_s=_CONNECT_TIMEOUT_S))
        self._stub = public_pb2_grpc.KvferryStub(self._channel)

    def models(self) -> list[Model]:
        """The models served."""
        try:
            return list(self._stub.ListModels(ListModelsRequest(), timeout=_QUICK_TIMEOUT_S).models)
        except grpc.RpcError as error:
            raise _failure(error, self.address) from None

    def default_model(self) -> str:
        """The first model served. Raises KvferryError UNKNOWN_MODEL when there is none."""
        return _first(self.models(), self.address)

    def generate(self, request: GenerateRequest) -> Generator[GenerateResponse, None, None]:
        """The answer as it comes; the last part has `finish`."""
        call = self._stub.Generate(request, timeout=self._timeout_s)
        try:
            yield from call
        except grpc.RpcError as error:
            raise _failure(error, self.address) from None
        finally:
            call.cancel()

    def receipt(self, request_id: str) -> KVReceipt:
        """The KV receipt of a finished request. Raises KvferryError when the router does not have it (any more)."""
        try:
            return self._stub.GetReceipt(GetReceiptRequest(request_id=request_id), timeout=_QUICK_TIMEOUT_S)
        except grpc.RpcError as error:
            raise _failure(error, self.address) from None

    def cluster_state(self) -> ClusterStateResponse:
        """A snapshot of workers, pools and requests in flight."""
        try:
            return self._stub.ClusterState(ClusterStateRequest(), timeout=_QUICK_TIMEOUT_S)
        except grpc.RpcError as error:
            raise _failure(error, self.address) from None

    def close(self) -> None:
        """Cancel what runs and disconnect."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc_val: BaseException | None, exc_tb: TracebackType | None
    ) -> None:
        self.close()


class AsyncClient:
    """The same for asyncio. Make and use it within one event loop."""

    def __init__(self, address: str, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """See `Client`."""
        self.address = address
        self._timeout_s = timeout_s
        self._channel = channel(address, connect_timeout_s=_CONNECT_TIMEOUT_S)
        self._stub = public_pb2_grpc.KvferryStub(self._channel)

    async def models(self) -> list[Model]:
        """See `Client.models`."""
        try:
            return list((await self._stub.ListModels(ListModelsRequest(), timeout=_QUICK_TIMEOUT_S)).models)
        except grpc.RpcError as error:
            raise _failure(error, self.address) from None

    async def default_model(self) -> str:
        """See `Client.default_model`."""
        return _first(await self.models(), self.address)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateResponse, None]:
        """See `Client.generate`. Close it (`aclosing`) to cancel before the garbage collector does."""
        call = self._stub.Generate(request, timeout=self._timeout_s)
        try:
            async for part in call:
                yield part
        except grpc.RpcError as error:
            raise _failure(error, self.address) from None
        finally:
            call.cancel()

    async def receipt(self, request_id: str) -> KVReceipt:
        """See `Client.receipt`."""
        try:
            return await self._stub.GetReceipt(GetReceiptRequest(request_id=request_id), timeout=_QUICK_TIMEOUT_S)
        except grpc.RpcError as error:
            raise _failure(error, self.address) from None

    async def cluster_state(self) -> ClusterStateResponse:
        """See `Client.cluster_state`."""
        try:
            return await self._stub.ClusterState(ClusterStateRequest(), timeout=_QUICK_TIMEOUT_S)
        except grpc.RpcError as error:
            raise _failure(error, self.address) from None

    async def close(self) -> None:
        """Cancel what runs and disconnect."""
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc_val: BaseException | None, exc_tb: TracebackType | None
    ) -> None:
        await self.close()


def _first(models: Sequence[Model], address: str) -> str:
    if not models:
        raise KvferryError(ErrorCode.UNKNOWN_MODEL, f"{address} serves no model yet")
    return models[0].id


def _failure(error: grpc.RpcError, address: str) -> KvferryError:
    failure = KvferryError.from_rpc(error, address)
    if failure.code == ErrorCode.UNAVAILABLE and "connect" in failure.message.lower():
        return KvferryError(
            ErrorCode.UNAVAILABLE, f"nothing answers at {address}: start a cluster with `kvferry up --model MODEL`"
        )
    return failure
