"""The Python client for asyncio: the same calls as `kvferry.client.Client`, awaited."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeVar, Unpack

import grpc

from kvferry.client.answers import AnswerBuilder, ChoicesBuilder, cluster_state, first_model, models
from kvferry.client.link import (
    DEFAULT_TIMEOUT_S,
    QUICK_TIMEOUT_S,
    failure_of,
    key_metadata,
    open_async_channels,
)
from kvferry.client.requests import (
    AnyMessage,
    ChatOptions,
    GenerationOptions,
    request_for_chat,
    request_for_text,
    request_to_tokenize,
)
from kvferry.client.retry import RetryPolicy, Route
from kvferry.client.types import (
    ChatAnswer,
    ChatEvent,
    ClusterState,
    Completion,
    Finished,
    Model,
    TextDelta,
    TextEvent,
    Tokens,
    Tool,
)
from kvferry_rpc.common_pb2 import KVReceipt
from kvferry_rpc.public_pb2 import (
    ClusterStateRequest,
    GenerateRequest,
    GenerateResponse,
    GetReceiptRequest,
    ListModelsRequest,
)
from kvferry_rpc.public_pb2_grpc import KvferryStub
from runtime.tls import TlsFiles

if TYPE_CHECKING:  # in the stubs only
    from kvferry_rpc.public_pb2_grpc import KvferryAsyncStub

T = TypeVar("T")


class AsyncClient:
    """For asyncio. Make and use it within one event loop. Methods and errors are those of `Client`."""

    def __init__(
        self,
        address: str | Sequence[str],
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        tls: TlsFiles | None = None,
        api_key: str = "",
        retry: RetryPolicy | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """See `Client`."""
        self._route = Route(address, retry or RetryPolicy())
        self._timeout_s = timeout_s
        self._metadata = key_metadata(api_key)
        self._sleep = sleep
        self._channels = open_async_channels(self._route.addresses, tls)
        self._stubs: list[KvferryAsyncStub] = [KvferryStub(channel) for channel in self._channels]
        self._model = ""

    @property
    def address(self) -> str:
        """See `Client.address`."""
        return self._route.address

    async def chat(self, messages: Sequence[AnyMessage], **options: Unpack[ChatOptions]) -> ChatAnswer:
        """See `Client.chat`."""
        return (await self.chat_choices(messages, 1, **options))[0]

    async def chat_choices(
        self, messages: Sequence[AnyMessage], n: int, **options: Unpack[ChatOptions]
    ) -> tuple[ChatAnswer, ...]:
        """See `Client.chat_choices`."""
        request = request_for_chat(await self._model_of(options), messages, n, options)
        return (await self._choices(request, options)).chats()

    async def stream_chat(
        self, messages: Sequence[AnyMessage], **options: Unpack[ChatOptions]
    ) -> AsyncGenerator[ChatEvent, None]:
        """See `Client.stream_chat`. Close it (`aclosing`) to cancel before the garbage collector does."""
        builder = AnswerBuilder()
        request = request_for_chat(await self._model_of(options), messages, 1, options)
        async with aclosing(self._parts(request, options)) as parts:
            async for part in parts:
                for event in builder.add(part):
                    yield event
        yield Finished(builder.chat())

    async def complete(self, prompt: str | Sequence[int], **options: Unpack[GenerationOptions]) -> Completion:
        """See `Client.complete`."""
        return (await self.complete_choices(prompt, 1, **options))[0]

    async def complete_choices(
        self, prompt: str | Sequence[int], n: int, **options: Unpack[GenerationOptions]
    ) -> tuple[Completion, ...]:
        """See `Client.complete_choices`."""
        request = request_for_text(await self._model_of(options), prompt, n, options)
        return (await self._choices(request, options)).completions()

    async def stream_complete(
        self, prompt: str | Sequence[int], **options: Unpack[GenerationOptions]
    ) -> AsyncGenerator[TextEvent, None]:
        """See `Client.stream_complete`. Close it (`aclosing`) to cancel before the garbage collector does."""
        builder = AnswerBuilder()
        request = request_for_text(await self._model_of(options), prompt, 1, options)
        async with aclosing(self._parts(request, options)) as parts:
            async for part in parts:
                for event in builder.add(part):
                    if isinstance(event, TextDelta):
                        yield event
        yield Finished(builder.completion())

    async def tokenize(
        self, prompt: str | Sequence[AnyMessage], *, tools: Sequence[Tool] | None = None, model: str = ""
    ) -> Tokens:
        """See `Client.tokenize`."""
        request = request_to_tokenize(model or await self.default_model(), prompt, tools)
        answer = await self._ask(
            lambda stub, timeout_s: stub.Tokenize(request, timeout=timeout_s, metadata=self._metadata)
        )
        return Tokens(tuple(answer.token_ids), answer.max_context_tokens)

    async def models(self) -> list[Model]:
        """See `Client.models`."""
        request = ListModelsRequest()
        return models(
            await self._ask(
                lambda stub, timeout_s: stub.ListModels(request, timeout=timeout_s, metadata=self._metadata)
            )
        )

    async def default_model(self) -> str:
        """See `Client.default_model`."""
        if not self._model:
            self._model = first_model(await self.models(), self.address)
        return self._model

    async def receipt(self, request_id: str) -> KVReceipt:
        """See `Client.receipt`."""
        request = GetReceiptRequest(request_id=request_id)
        return await self._ask(
            lambda stub, timeout_s: stub.GetReceipt(request, timeout=timeout_s, metadata=self._metadata)
        )

    async def cluster_state(self) -> ClusterState:
        """See `Client.cluster_state`."""
        request = ClusterStateRequest()
        return cluster_state(
            await self._ask(
                lambda stub, timeout_s: stub.ClusterState(request, timeout=timeout_s, metadata=self._metadata)
            )
        )

    async def generate(
        self, request: GenerateRequest, *, timeout_s: float | None = None
    ) -> AsyncGenerator[GenerateResponse, None]:
        """See `Client.generate`. Close it (`aclosing`) to cancel before the garbage collector does."""
        attempts = self._route.begin(self._timeout_s if timeout_s is None else timeout_s)
        while True:
            index, begun = self._route.index, False
            call = self._stubs[index].Generate(request, timeout=attempts.remaining_s, metadata=self._metadata)
            try:
                async for part in call:
                    begun = True
                    yield part
                return
            except grpc.RpcError as error:
                failure = failure_of(error, self._route.addresses[index])
            finally:
                call.cancel()
            if begun:
                raise failure
            await self._sleep(attempts.wait_after(failure, index))

    async def close(self) -> None:
        """Cancel what runs and disconnect."""
        for channel in self._channels:
            await channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc_val: BaseException | None, exc_tb: TracebackType | None
    ) -> None:
        await self.close()

    # ---- inside ----

    async def _model_of(self, options: GenerationOptions) -> str:
        return options.get("model") or await self.default_model()

    def _parts(self, request: GenerateRequest, options: GenerationOptions) -> AsyncGenerator[GenerateResponse, None]:
        return self.generate(request, timeout_s=options.get("timeout_s"))

    async def _choices(self, request: GenerateRequest, options: GenerationOptions) -> ChoicesBuilder:
        builder = ChoicesBuilder(request.n)
        async with aclosing(self._parts(request, options)) as parts:
            async for part in parts:
                builder.add(part)
        return builder

    async def _ask(self, ask: "Callable[[KvferryAsyncStub, float], Awaitable[T]]") -> T:
        """See `Client._ask`."""
        attempts = self._route.begin(min(QUICK_TIMEOUT_S, self._timeout_s))
        while True:
            index = self._route.index
            try:
                return await ask(self._stubs[index], attempts.remaining_s)
            except grpc.RpcError as error:
                failure = failure_of(error, self._route.addresses[index])
            await self._sleep(attempts.wait_after(failure, index))
