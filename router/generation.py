"""The seam between the APIs and the cluster: what is asked for, and what comes back as text.

Both front doors (HTTP and gRPC) build a `GenerationRequest`, take `TextChunk`s and get one `TextEnd`;
the dispatcher below knows only tokens. So both APIs give the same text for the same tokens.

What comes back is pushed: a step of the engine goes through all layers up to the client's connection in one call, and
no task is woken for it. A task wakes for what may have to wait: the beginning, a reader that is slow, the end.
"""

from dataclasses import dataclass
from typing import Protocol, TypeVar

from msgspec import Struct

from kvferry_rpc.common_pb2 import FinishReason, KVReceipt, PromptTokenLogprob, SamplingParams, TokenOutput

T_contra = TypeVar("T_contra", contravariant=True)


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One sequence to generate, validated: nothing below this line checks the client's input again but the workers.

    `deadline` is a time on the router's monotonic clock, in seconds. `sampling.seed` is always set. `tenant` is the
    name of whose request it is, empty where there are no keys; of a `priority`, higher is served first. `slo` names its
    class, if any (`slo.py`). `endpoint` says, for people, which API it came by; `traceparent` (W3C Trace Context) under
    which span its work is recorded, empty: it is not. `shown_tokens` are special tokens that become text, as others do
    not. `prompt_only`: nothing but the prompt is wanted, scored maybe; the one token that is sampled is not part of an
    answer.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    deadline: float
    stop: tuple[str, ...] = ()
    cache_salt: bytes = b""
    tenant: str = ""
    priority: int = 0
    slo: str = ""
    endpoint: str = ""
    traceparent: str = ""
    shown_tokens: frozenset[str] = frozenset()
    prompt_only: bool = False


# Made for every token, as the other structs are: a frozen dataclass takes five times as long.
class TokenBatch(Struct, frozen=True, gc=False):
    """Tokens that one engine step produced for a request, consecutive by index and never repeated.

    `prompt_logprobs`: with the first batch, if `sampling.prompt_logprobs` asks for them: all positions of the prompt
    but the first, in order.
    """

    tokens: tuple[TokenOutput, ...]
    prompt_logprobs: tuple[PromptTokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class TokenEnd:
    """What a token stream ends with: why it ended and what it cost. `cached_tokens` counts prompt tokens
    that no worker had to compute for this request."""

    reason: "FinishReason.ValueType"
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    receipt: KVReceipt


class Sink(Protocol[T_contra]):
    """Where a stream goes, item by item. Both methods are for its one source, on the event-loop thread."""

    def push(self, item: T_contra) -> bool:
        """Take the next item, in microseconds. False: the source awaits `wants_more` before it pushes another one.

        It may be called from any task. What it raises ends the stream, as if its reader had gone away.
        """
        ...

    async def wants_more(self) -> bool:
        """Wait until there is room for the next item; false: the reader has what it wanted, such as a stop string.

        Awaited in the task that awaits the source, after a `push` that returned False. Raises as `push` does.
        """
        ...


class TokenSource(Protocol):
    """Runs a request on the cluster. The dispatcher is the real one; tests script their own."""

    async def run(self, request: GenerationRequest, sink: Sink[TokenBatch]) -> TokenEnd:
        """Push batches to `sink` until the answer has ended, or the sink wants no more: then the request is cancelled
        on its workers but counts as served, and the end comes when its receipt is as whole as it can be, in a second
        at most. Raises KvferryError when the request cannot be finished, and what the sink raised.

        Cancelling the task that awaits this cancels the request on every worker. Event-loop task only.
        """
        ...


class TextChunk(Struct, frozen=True, gc=False):
    """Text that has become final, and the tokens received with it. Text may lag behind the tokens (a character
    split over tokens, a possible start of a stop string), never run ahead of them. `prompt_logprobs`: those of a
    TokenBatch, before any text."""

    text: str
    tokens: tuple[TokenOutput, ...]
    prompt_logprobs: tuple[PromptTokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class TextEnd:
    """What a text stream ends with. `reason` is STOP when a stop string cut the answer, which `stop_string` then
    names. When a stop string ended it early, `completion_tokens` counts the tokens received by then, and `receipt` what
    was known then."""

    reason: "FinishReason.ValueType"
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    receipt: KVReceipt
    stop_string: str | None = None
