"""What tells one generation endpoint from another: how its body is read and its answer dressed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from kvferry_rpc.common_pb2 import KVReceipt
from router.generation import TextChunk, TextEnd
from router.http.errors import HttpError
from router.http.field_names import OWN_NAMES, FieldNames
from router.http.openai_responses import Answer, AnswerHead, Echo
from router.plans.generation_plan import GenerationPlan, ModelLimits
from router.text.tokenizer import Tokenizer

B = TypeVar("B")


class AnswerShape(Protocol):
    """How the answer to one request is dressed: by `body`, or by the others as a stream of server-sent events."""

    def body(self, answers: Sequence[Answer], usage: dict[str, Any], receipt: KVReceipt | None) -> bytes:
        """The whole answer. `usage` is OpenAI's; `receipt` is None unless the client wants it."""

    def events(self, index: int, item: TextChunk | TextEnd) -> bytes:
        """What the next item of a choice makes, as whole events; empty when there is nothing to show yet."""

    def closing(self) -> bytes:
        """The last events, once all choices have ended."""

    def failure(self, error: HttpError) -> bytes:
        """The last events of a stream that went wrong after it began."""

    def heartbeat(self) -> bytes:
        """What is sent in a long silence."""


ShapeOf = Callable[[GenerationPlan, AnswerHead, Tokenizer, Sequence[Echo]], AnswerShape]


@dataclass(frozen=True, slots=True)
class Asked:
    """What a body asks for. `fields` are the client's names for what the plan's errors blame."""

    plan: GenerationPlan
    shape: ShapeOf
    fields: FieldNames = OWN_NAMES


@dataclass(frozen=True, slots=True)
class EndpointKind(Generic[B]):
    """`read` may run in another thread, and raises KvferryError naming a field of the body. `id_headers` are those of
    an answer that have the request's id."""

    name: str
    id_prefix: str
    body_type: type[B]
    read: Callable[[B, ModelLimits], Asked]
    id_headers: tuple[str, ...] = ("x-request-id",)
