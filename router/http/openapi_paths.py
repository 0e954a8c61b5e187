"""The operations of the HTTP API, for its OpenAPI document: what each takes and what it answers."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from router.http.anthropic_requests import CountBody, MessagesBody
from router.http.openai_requests import ChatBody, CompletionBody, TokenizeBody
from router.http.openapi_answers import (
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    CompletionChunk,
    DebugRequests,
    Error,
    Health,
    Model,
    ModelList,
    Readiness,
    Receipt,
    Tokens,
)
from router.http.openapi_anthropic import AnthropicError, AnthropicMessage, MessageEvent, TokenCount
from router.http.openapi_responses import RESPONSE_EVENTS, Response
from router.http.responses_requests import ResponsesBody

# Of a request that never comes to its endpoint; the socket side answers those.
_ALWAYS: Final = (400, 408, 431)
_OF_BODY: Final = (413, 415, 429)
_GENERATION: Final = (404, *_OF_BODY, 500, 502, 503, 504)


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of one path. `events` are the types of a stream's data; empty = it never streams. `errors` come
    besides those that everything has; with `keyed` also 401. `text`: the media type of an answer that is no JSON."""

    method: str
    path: str
    name: str
    summary: str
    answer: Any = None
    body: Any = None
    events: tuple[Any, ...] = ()
    errors: tuple[int, ...] = ()
    error: Any = Error
    keyed: bool = True
    text: str = ""
    parameters: tuple[Mapping[str, Any], ...] = ()
    answer_headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def statuses(self) -> tuple[int, ...]:
        """Of all its errors."""
        return tuple(sorted({*_ALWAYS, *self.errors, *((401,) if self.keyed else ())}))


def _header(name: str, description: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"name": name, "in": "header", "required": False, "description": description, "schema": dict(schema)}


def _in_path(name: str, description: str) -> dict[str, Any]:
    schema = {"type": "string", "minLength": 1}
    return {"name": name, "in": "path", "required": True, "description": description, "schema": schema}


_REQUEST_HEADERS: Final = (
    _header(
        "x-request-timeout-ms",
        "Milliseconds from the request's arrival to its deadline, if that is sooner than the router's.",
        {"type": "integer", "minimum": 1, "maximum": 10**12 - 1},
    ),
    _header("x-kvferry-receipt", "`1`: as `kv_receipt` in the body.", {"type": "string"}),
    _header("x-request-id", "Written to the router's log beside the request.", {"type": "string"}),
)
_ID: Final = {"x-request-id": "The router's own id of the request: the name of its receipt and of log lines."}
_ANTHROPIC_ID: Final = {**_ID, "request-id": "The same."}


def _generation(path: str, name: str, summary: str, **rest: Any) -> Operation:
    return Operation(
        "post", path, name, summary, errors=_GENERATION, parameters=_REQUEST_HEADERS, **{"answer_headers": _ID, **rest}
    )


OPERATIONS: Final = (
    _generation(
        "/v1/chat/completions", "createChatCompletion", "An answer to a conversation, whole or as a stream.",
        body=ChatBody, answer=ChatCompletion, events=(ChatCompletionChunk, Error),
    ),
    _generation(
        "/v1/completions", "createCompletion", "A text continued as it stands.",
        body=CompletionBody, answer=Completion, events=(CompletionChunk, Error),
    ),
    _generation(
        "/v1/responses", "createResponse", "A chat in the shape of OpenAI's Responses API. Answers are not kept.",
        body=ResponsesBody, answer=Response, events=RESPONSE_EVENTS,
    ),
    _generation(
        "/v1/messages", "createMessage", "A chat in the shape of Anthropic's Messages API.",
        body=MessagesBody, answer=AnthropicMessage, events=(MessageEvent,),
        error=AnthropicError, answer_headers=_ANTHROPIC_ID,
    ),
    Operation(
        "post", "/v1/messages/count_tokens", "countTokens", "How many tokens the prompt of such a request has.",
        body=CountBody, answer=TokenCount, errors=(404, *_OF_BODY, 500), error=AnthropicError,
    ),
    Operation(
        "post", "/tokenize", "tokenize", "Token ids exactly as a generation would use them.",
        body=TokenizeBody, answer=Tokens, errors=(404, *_OF_BODY, 500),
    ),
    Operation("get", "/v1/models", "listModels", "The model served.", answer=ModelList),
    Operation(
        "get", "/v1/models/{model}", "getModel", "The model of this name.", answer=Model, errors=(404,),
        parameters=(_in_path("model", "It may hold slashes."),),
    ),
    Operation(
        "get", "/v1/receipts/{request_id}", "getReceipt", "The KV receipt of a request that has ended.",
        answer=Receipt, errors=(404,), parameters=(_in_path("request_id", "As in `x-request-id` of its answer."),),
    ),
    Operation(
        "get", "/debug/requests", "listRequests", "What each request waits for, since when; the last that ended.",
        answer=DebugRequests,
    ),
    Operation("get", "/health", "health", "The process lives.", answer=Health, keyed=False),
    Operation(
        "get", "/ready", "ready", "Whether requests can be served now, else 503 and the reason.",
        answer=Readiness, errors=(503,), keyed=False,
    ),
    Operation("get", "/metrics", "metrics", "Metrics for Prometheus.", text="text/plain", keyed=False),
    Operation("get", "/openapi.json", "openapi", "This document.", answer=dict[str, Any], keyed=False),
)  # fmt: skip
