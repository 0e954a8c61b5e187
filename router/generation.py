"""The seam between the APIs and the cluster: what is asked for, and what comes back as text.

Both front doors (HTTP and gRPC) build a `GenerationRequest` and read `TextChunk`s and one `TextEnd`;
the dispatcher below knows only tokens. So both APIs give the same text for the same tokens.
"""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

from kvferry_rpc.common_pb2 import FinishReason, KVReceipt, PromptTokenLogprob, SamplingParams, TokenOutput


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


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Tokens that one engine step produced for a request, consecutive by index and never repeated.

    `prompt_logprobs`: with the first batch, if `sampling.prompt_logprobs` asks for them: all positions of the prompt
    but the first, in order.
    """

    tokens: tuple[TokenOutput, ...]
    prompt_logprobs: tuple[PromptTokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class TokenEnd:
    """The last item of a token stream: why it ended and what it cost. `cached_tokens` counts prompt tokens
    that no worker had to compute for this request."""

    reason: "FinishReason.ValueType"
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    receipt: KVReceipt


class EnoughTokens(Exception):
    """Thrown into a token stream (with `athrow`) by a reader that has what it wanted, such as a stop string.

    That is not the same as going away: the request is cancelled on its workers but counts as served, and the stream's
    next and last item is its TokenEnd, once the receipt is as whole as it can be, in a second at most.
    """


class TokenSource(Protocol):
    """Runs a request on the cluster. The dispatcher is the real one; tests script their own."""

    def tokens(self, request: GenerationRequest) -> AsyncIterator[TokenBatch | TokenEnd]:
        """Yield batches, then exactly one TokenEnd. Raises KvferryError when the request cannot be finished.

        Closing the iterator early cancels the request on every worker. A reader that has what it wanted throws
        EnoughTokens into it instead, and gets the TokenEnd: the request counts as served. Event-loop task only.
        """
        ...


@dataclass(frozen=True, slots=True)
class TextChunk:
    """Text that has become final, and the tokens received with it. Text may lag behind the tokens (a character
    split over tokens, a possible start of a stop string), never run ahead of them. `prompt_logprobs`: those of a
    TokenBatch, before any text."""

    text: str
    tokens: tuple[TokenOutput, ...]
    prompt_logprobs: tuple[PromptTokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class TextEnd:
    """The last item of a text stream. `reason` is STOP when a stop string cut the answer, which `stop_string` then
    names. When a stop string ended it early, `completion_tokens` counts the tokens received by then, and `receipt` what
    was known then."""

    reason: "FinishReason.ValueType"
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    receipt: KVReceipt
    stop_string: str | None = None
