"""OpenAI's Responses API over the same chats as its chat completions. Nothing is kept."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import msgspec
import orjson

from router.http.endpoint_kind import Asked, EndpointKind
from router.http.openai_requests import TextFormat
from router.http.openai_responses import AnswerHead, Echo
from router.http.responses_chat import chat_of
from router.http.responses_items import Fields
from router.http.responses_requests import ResponsesBody
from router.http.responses_shape import ResponseShape
from router.plans.generation_plan import GenerationPlan, ModelLimits, plan_chat
from router.text.tokenizer import Tokenizer
from router.text.tools import json_text
from runtime.errors import invalid


def plan_response(body: ResponsesBody, limits: ModelLimits) -> Asked:
    """Raises KvferryError naming the field at fault."""
    chat, fields = chat_of(body)
    with fields.applied():
        plan = plan_chat(chat, limits)
    plan = replace(plan, max_tokens_field="max_output_tokens", prompt_field="input")
    if plan.num_logprobs is not None and plan.chat is not None and (plan.chat.tools or plan.chat.reasoning):
        raise invalid("include", "can have logprobs only where an answer is nothing but text: no tools, no reasoning")
    echo = _echo(body)

    def shape(plan: GenerationPlan, head: AnswerHead, tokens: Tokenizer, echoes: Sequence[Echo]) -> ResponseShape:
        return ResponseShape(plan, head, tokens, echo)

    return Asked(plan, shape, fields)


def _echo(body: ResponsesBody) -> Fields:
    """What an answer repeats of the request, defaults filled in. What holds schemas is encoded once, and by the encoder
    that takes numbers of any size."""
    text_format = (body.text.format if body.text is not None else None) or TextFormat()
    return {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "top_logprobs": body.top_logprobs or 0,
        "tools": orjson.Fragment(json_text("tools", body.tools or [])),
        "tool_choice": "auto" if body.tool_choice is None else msgspec.to_builtins(body.tool_choice),
        "text": {"format": orjson.Fragment(json_text("text.format", msgspec.to_builtins(text_format)))},
        "reasoning": {"effort": None, "summary": None},
        "background": False,
        "previous_response_id": None,
        "service_tier": "default",
        "store": False,
        "truncation": "disabled",
        "user": body.user,
    }


RESPONSES: Final = EndpointKind("responses", "resp_", ResponsesBody, plan_response)
