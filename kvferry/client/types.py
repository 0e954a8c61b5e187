"""What the Python client takes and gives: plain frozen values, no protobuf but the KV receipt."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from kvferry_rpc.common_pb2 import KVReceipt


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that an answer made. `arguments` is JSON text as the model wrote it; it may be incomplete where the answer
    was cut off."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation. `role` is system, user, assistant or tool; the result of a tool names the id of
    its call in `tool_call_id`."""

    role: str
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""
    reasoning: str | None = None


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call. `parameters` is a JSON Schema of the type object; None: it takes none."""

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] | None = None
    strict: bool | None = None


@dataclass(frozen=True, slots=True)
class JsonObject:
    """The answer is any JSON object."""


@dataclass(frozen=True, slots=True)
class JsonSchema:
    """The answer is JSON that keeps to this schema."""

    schema: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Regex:
    """The whole answer matches this."""

    pattern: str


@dataclass(frozen=True, slots=True)
class Ebnf:
    """The answer follows this grammar, in llama.cpp's form (GBNF)."""

    grammar: str


ResponseFormat = JsonObject | JsonSchema | Regex | Ebnf
FinishReason = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens. `cached_tokens` of the prompt needed no computing; `reasoning_tokens` are part of `completion_tokens`."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    reasoning_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Alternative:
    """A token and its log probability, at a place where it was possible."""

    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The log probability of one token of an answer, and those of the likeliest tokens at its place."""

    token_id: int
    logprob: float
    alternatives: tuple[Alternative, ...] = ()


@dataclass(frozen=True, slots=True)
class PromptLogprob:
    """The same for the token of the prompt at `position` (1 or more; the first one has none before it). `rank` 1: no
    token was likelier."""

    position: int
    token_id: int
    logprob: float
    rank: int
    alternatives: tuple[Alternative, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A whole answer. `logprobs` and `prompt_logprobs` are empty, and `receipt` None, unless they were asked for.
    `stop_string` is the one that ended it, if one did."""

    request_id: str
    text: str
    finish_reason: FinishReason
    usage: Usage
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[PromptLogprob, ...] = ()
    stop_string: str | None = None
    receipt: KVReceipt | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatAnswer(Completion):
    """The answer to a conversation: `text` is its content, without reasoning and calls."""

    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()

    @property
    def message(self) -> Message:
        """This answer as a part of the conversation that goes on; without its reasoning, which models do not want."""
        return Message("assistant", self.text, self.tool_calls)


@dataclass(frozen=True, slots=True)
class TextDelta:
    """The next piece of the text; never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """The next piece of the reasoning; never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """A call begins. `index` counts the calls of an answer from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """The next piece of a call's arguments; never empty."""

    index: int
    fragment: str


A = TypeVar("A", bound=Completion)


@dataclass(frozen=True, slots=True)
class Finished(Generic[A]):
    """The last event of a stream, with the whole answer."""

    answer: A


TextEvent = TextDelta | Finished[Completion]
ChatEvent = TextDelta | ReasoningDelta | ToolCallStart | ToolCallArguments | Finished[ChatAnswer]


@dataclass(frozen=True, slots=True)
class Model:
    """A model served. `max_context_tokens` bounds prompt and answer together."""

    id: str
    max_context_tokens: int


@dataclass(frozen=True, slots=True)
class Tokens:
    """A tokenised prompt."""

    token_ids: tuple[int, ...]
    max_context_tokens: int


@dataclass(frozen=True, slots=True)
class WorkerState:
    """One worker, `report_age_ms` ago. The fields are those of proto/kvferry_rpc/public.proto, which explains them."""

    worker_id: str
    role: str
    address: str
    state: str
    pid: int
    blocks_total: int
    blocks_free: int
    blocks_cached: int
    blocks_used: int
    blocks_quarantined: int
    sequences_running: int
    sequences_waiting: int
    sequences_receiving: int
    steps: int
    preemptions: int
    report_age_ms: int
    block_size: int
    drafted_tokens: int
    accepted_tokens: int


@dataclass(frozen=True, slots=True)
class ClusterState:
    """What one router sees: its workers, and its requests in flight, of which some may be queued."""

    model: str
    router_id: str
    requests_in_flight: int
    requests_queued: int
    workers: tuple[WorkerState, ...]
