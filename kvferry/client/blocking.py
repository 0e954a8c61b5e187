"""The Python client of the public gRPC service whose calls block; `asynchronous.py` has its twin for asyncio.

    with Client("127.0.0.1:8001") as client:
        print(client.chat([("user", "Hello")]).text)
        for event in client.stream_chat([("user", "Hello")], max_tokens=64):
            if isinstance(event, TextDelta):
                print(event.text, end="")

Every failure is a KvferryError. Leaving a stream early, or closing its iterator, cancels the generation end to end.
Where a router is not there or has no room, a call is tried again and elsewhere (`RetryPolicy`), but only until the
first part of an answer has come.
"""

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from types import TracebackType
from typing import Self, TypeVar, Unpack

import grpc

from kvferry.client.answers import AnswerBuilder, ChoicesBuilder, cluster_state, first_model, models
from kvferry.client.link import (
    DEFAULT_TIMEOUT_S,
    QUICK_TIMEOUT_S,
    failure_of,
    key_metadata,
    open_channels,
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

T = TypeVar("T")


class Client:
    """Synchronous client of one router, or of several side by side. Threads may share it."""

    def __init__(
        self,
        address: str | Sequence[str],
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        tls: TlsFiles | None = None,
        api_key: str = "",
        retry: RetryPolicy | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`address` is host:port of the router's gRPC service, or several: the next one is asked where one does not
        answer. `timeout_s` bounds a whole generation, tries included. With `tls` the connection is encrypted:
        `TlsFiles()` trusts the public authorities, `ca_file` one's own, and `cert_file` with `key_file` are shown to a
        router that asks. `retry` None: a RetryPolicy as it is. `sleep` waits between tries, in seconds.
        Raises OSError or ValueError when those files cannot be used, and ValueError without an address."""
        self._route = Route(address, retry or RetryPolicy())
        self._timeout_s = timeout_s
        self._metadata = key_metadata(api_key)
        self._sleep = sleep
        self._channels = open_channels(self._route.addresses, tls)
        self._stubs = [KvferryStub(channel) for channel in self._channels]
        self._model = ""

    @property
    def address(self) -> str:
        """The router that is asked next."""
        return self._route.address

    def chat(self, messages: Sequence[AnyMessage], **options: Unpack[ChatOptions]) -> ChatAnswer:
        """The whole answer to a conversation."""
        return self.chat_choices(messages, 1, **options)[0]

    def chat_choices(
        self, messages: Sequence[AnyMessage], n: int, **options: Unpack[ChatOptions]
    ) -> tuple[ChatAnswer, ...]:
        """`n` answers to a conversation; with a seed, answer i has seed + i."""
        request = request_for_chat(self._model_of(options), messages, n, options)
        return self._choices(request, options).chats()

    def stream_chat(
        self, messages: Sequence[AnyMessage], **options: Unpack[ChatOptions]
    ) -> Generator[ChatEvent, None, None]:
        """The answer as it comes; the last event is Finished."""
        builder = AnswerBuilder()
        request = request_for_chat(self._model_of(options), messages, 1, options)
        with closing(self._parts(request, options)) as parts:
            for part in parts:
                yield from builder.add(part)
        yield Finished(builder.chat())

    def complete(self, prompt: str | Sequence[int], **options: Unpack[GenerationOptions]) -> Completion:
        """The whole continuation of a text, or of token ids."""
        return self.complete_choices(prompt, 1, **options)[0]

    def complete_choices(
        self, prompt: str | Sequence[int], n: int, **options: Unpack[GenerationOptions]
    ) -> tuple[Completion, ...]:
        """`n` continuations; with a seed, number i has seed + i."""
        request = request_for_text(self._model_of(options), prompt, n, options)
        return self._choices(request, options).completions()

    def stream_complete(
        self, prompt: str | Sequence[int], **options: Unpack[GenerationOptions]
    ) -> Generator[TextEvent, None, None]:
        """The continuation as it comes; the last event is Finished."""
        builder = AnswerBuilder()
        request = request_for_text(self._model_of(options), prompt, 1, options)
        with closing(self._parts(request, options)) as parts:
            for part in parts:
                yield from (event for event in builder.add(part) if isinstance(event, TextDelta))
        yield Finished(builder.completion())

    def tokenize(
        self, prompt: str | Sequence[AnyMessage], *, tools: Sequence[Tool] | None = None, model: str = ""
    ) -> Tokens:
        """The token ids of a text, or of a conversation and its tools."""
        request = request_to_tokenize(model or self.default_model(), prompt, tools)
        answer = self._ask(lambda stub, timeout_s: stub.Tokenize(request, timeout=timeout_s, metadata=self._metadata))
        return Tokens(tuple(answer.token_ids), answer.max_context_tokens)

    def models(self) -> list[Model]:
        """The models served."""
        request = ListModelsRequest()
        return models(
            self._ask(lambda stub, timeout_s: stub.ListModels(request, timeout=timeout_s, metadata=self._metadata))
        )

    def default_model(self) -> str:
        """The first model served, asked for once. Raises KvferryError UNKNOWN_MODEL when there is none."""
        if not self._model:
            self._model = first_model(self.models(), self.address)
        return self._model

    def receipt(self, request_id: str) -> KVReceipt:
        """The KV receipt of a finished request. Raises KvferryError when the router does not have it (any more)."""
        request = GetReceiptRequest(request_id=request_id)
        return self._ask(lambda stub, timeout_s: stub.GetReceipt(request, timeout=timeout_s, metadata=self._metadata))

    def cluster_state(self) -> ClusterState:
        """A snapshot of workers, pools and requests in flight."""
        request = ClusterStateRequest()
        return cluster_state(
            self._ask(lambda stub, timeout_s: stub.ClusterState(request, timeout=timeout_s, metadata=self._metadata))
        )

    def generate(
        self, request: GenerateRequest, *, timeout_s: float | None = None
    ) -> Generator[GenerateResponse, None, None]:
        """The service's own messages as they come; the last one of each choice has `finish`."""
        attempts = self._route.begin(self._timeout_s if timeout_s is None else timeout_s)
        while True:
            index, begun = self._route.index, False
            call = self._stubs[index].Generate(request, timeout=attempts.remaining_s, metadata=self._metadata)
            try:
                for part in call:
                    begun = True
                    yield part
                return
            except grpc.RpcError as error:
                failure = failure_of(error, self._route.addresses[index])
            finally:
                call.cancel()
            if begun:
                raise failure
            self._sleep(attempts.wait_after(failure, index))

    def close(self) -> None:
        """Cancel what runs and disconnect."""
        for channel in self._channels:
            channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc_val: BaseException | None, exc_tb: TracebackType | None
    ) -> None:
        self.close()

    # ---- inside ----

    def _model_of(self, options: GenerationOptions) -> str:
        return options.get("model") or self.default_model()

    def _parts(self, request: GenerateRequest, options: GenerationOptions) -> Generator[GenerateResponse, None, None]:
        return self.generate(request, timeout_s=options.get("timeout_s"))

    def _choices(self, request: GenerateRequest, options: GenerationOptions) -> ChoicesBuilder:
        builder = ChoicesBuilder(request.n)
        for part in self._parts(request, options):
            builder.add(part)
        return builder

    def _ask(self, ask: Callable[[KvferryStub, float], T]) -> T:
        """Make a call that changes nothing, again where that is worth it."""
        attempts = self._route.begin(min(QUICK_TIMEOUT_S, self._timeout_s))
        while True:
            index = self._route.index
            try:
                return ask(self._stubs[index], attempts.remaining_s)
            except grpc.RpcError as error:
                failure = failure_of(error, self._route.addresses[index])
            self._sleep(attempts.wait_after(failure, index))
