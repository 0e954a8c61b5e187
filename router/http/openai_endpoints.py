"""OpenAI's two older generation endpoints, whose streams are chunks of JSON and then [DONE]."""

from collections.abc import Sequence
from typing import Any, Final

from kvferry_rpc.common_pb2 import KVReceipt
from router.generation import TextChunk, TextEnd
from router.http.endpoint_kind import Asked, EndpointKind
from router.http.errors import HttpError
from router.http.openai_requests import ChatBody, CompletionBody
from router.http.openai_responses import Answer, AnswerHead, ChatShape, ChunkShape, CompletionShape, Echo, usage_of
from router.http.sse import DONE, HEARTBEAT, event
from router.plans.generation_plan import GenerationPlan, plan_chat, plan_completion
from router.text.tokenizer import Tokenizer


class ChunkedAnswer:
    """The answer to a request in one of OpenAI's chunked shapes. Of a stream it knows which choices have begun and
    ended, since the receipt goes into its very last chunk."""

    def __init__(self, shape: ChunkShape, plan: GenerationPlan) -> None:
        self._shape = shape
        self._plan = plan
        self._opened: set[int] = set()
        self._ends: list[TextEnd | None] = [None] * (len(plan.prompts) * plan.num_choices)

    def body(self, answers: Sequence[Answer], usage: dict[str, Any], receipt: KVReceipt | None) -> bytes:
        return self._shape.body(answers, usage, receipt)

    def events(self, index: int, item: TextChunk | TextEnd) -> bytes:
        chunks = []
        if index not in self._opened:
            self._opened.add(index)
            chunks.append(self._shape.opening(index))
        if isinstance(item, TextEnd):
            self._ends[index] = item
            is_last = None not in self._ends and not self._plan.include_usage
            chunks.append(self._shape.finish(index, item, self._receipt() if is_last else None))
        else:
            chunks.append(self._shape.delta(index, item))
        return b"".join(event(chunk) for chunk in chunks if chunk is not None)

    def closing(self) -> bytes:
        if not self._plan.include_usage:
            return DONE
        usage = usage_of([end for end in self._ends if end is not None], self._plan.num_choices)
        return event(self._shape.usage(usage, self._receipt())) + DONE

    def failure(self, error: HttpError) -> bytes:
        return event(error.body())

    def heartbeat(self) -> bytes:
        return HEARTBEAT

    def _receipt(self) -> KVReceipt | None:
        first = self._ends[0]
        return first.receipt if self._plan.want_receipt and first is not None else None


def _chat(plan: GenerationPlan, head: AnswerHead, tokens: Tokenizer, echoes: Sequence[Echo]) -> ChunkedAnswer:
    return ChunkedAnswer(ChatShape(head, tokens), plan)


def _completion(plan: GenerationPlan, head: AnswerHead, tokens: Tokenizer, echoes: Sequence[Echo]) -> ChunkedAnswer:
    return ChunkedAnswer(CompletionShape(head, tokens, echoes), plan)


CHAT: Final = EndpointKind("chat", "chatcmpl-", ChatBody, lambda body, limits: Asked(plan_chat(body, limits), _chat))
COMPLETIONS: Final = EndpointKind(
    "completions", "cmpl-", CompletionBody, lambda body, limits: Asked(plan_completion(body, limits), _completion)
)
