"""Anthropic's Messages API over the same chats as OpenAI's."""

from collections.abc import Sequence
from typing import Final

from router.http.anthropic_chat import chat_of, hides_thinking
from router.http.anthropic_messages import MessageShape, error_body
from router.http.anthropic_requests import CountBody, MessagesBody
from router.http.endpoint_kind import Asked, EndpointKind
from router.http.errors import HttpError
from router.http.field_names import FieldNames
from router.http.openai_responses import AnswerHead, Echo
from router.plans.generation_plan import GenerationPlan, ModelLimits, Prompt, plan_chat
from router.text.tokenizer import Tokenizer

PATH: Final = "/v1/messages"


def plan_messages(body: MessagesBody, limits: ModelLimits) -> Asked:
    """Raises KvferryError naming the field at fault."""
    chat, fields = chat_of(body)
    with fields.applied():
        plan = plan_chat(chat, limits)
        hidden = hides_thinking(body, has_reasoning=limits.chat.reasoning)

    def shape(plan: GenerationPlan, head: AnswerHead, tokens: Tokenizer, echoes: Sequence[Echo]) -> MessageShape:
        return MessageShape(plan, head, hide_thinking=hidden)

    return Asked(plan, shape, fields)


def counted_prompt(body: CountBody, limits: ModelLimits) -> tuple[Prompt, FieldNames]:
    """The prompt that a generation would have. Raises KvferryError naming the field at fault."""
    chat, fields = chat_of(body)
    with fields.applied():
        return plan_chat(chat, limits).prompts[0], fields


def is_messages_path(path: str) -> bool:
    """Whether failures at this path have Anthropic's shape."""
    return path == PATH or path.startswith(PATH + "/")


def messages_error(error: HttpError) -> bytes:
    """The body of an error answer."""
    return error_body(error, error.headers.get("request-id"))


MESSAGES: Final = EndpointKind("messages", "msg_", MessagesBody, plan_messages, ("x-request-id", "request-id"))
