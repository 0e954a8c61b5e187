"""GET /openapi.json: the HTTP API as an OpenAPI 3.1 document, made from the types that bodies are read into.

Types say the fields and most bounds; `openapi_bounds` has the others, `openapi_paths` the operations. The document says
what one field may hold: which fields go together is in docs/api.md.
"""

import functools
from collections.abc import Mapping
from typing import Any, Final

import msgspec
import orjson

from router.http.openapi_bounds import bounded
from router.http.openapi_paths import OPERATIONS, Operation
from router.http.openapi_roles import refined
from router.http.responses_requests import Item

_REF: Final = "#/components/schemas/{name}"
_JSON: Final = "application/json"
# Of the API, not of the program.
_VERSION: Final = "1"
_SECRETS: Final[tuple[dict[str, list[str]], ...]] = ({"bearer": []}, {"api_key": []})
_ERRORS: Final[Mapping[int, str]] = {
    400: "A field is malformed or out of range, or the prompt does not fit the context.",
    401: "The API key is missing or wrong.",
    404: "There is no such thing here: another model, or an id that is not known.",
    408: "The request did not arrive in time.",
    413: "The body is too large.",
    415: "The body is not JSON in UTF-8, or its encoding is not known.",
    429: "A queue is full, or a limit of the tenant is reached.",
    431: "The request's head is too large.",
    500: "A defect.",
    502: "KV blocks could not be moved or did not verify.",
    503: "Requests cannot be served now: no worker, workers lost, too many connections, or a router that leaves.",
    504: "The deadline passed.",
}
_ERROR_HEADERS: Final[Mapping[int, Mapping[str, str]]] = {
    401: {"www-authenticate": "`Bearer`."},
    415: {"accept-encoding": "Encodings that a body may have."},
    429: {"retry-after": "Seconds."},
    503: {"retry-after": "Seconds."},
}
_ON_STREAMS: Final = " With `stream`: server-sent events, whose data is of the schema `x-event-data`, or `[DONE]`."
_ABOUT: Final = (
    "OpenAI's and Anthropic's APIs over a cluster that computes prompts and answers on different workers. "
    "What is not listed here is refused by name, never ignored. Bodies may be compressed (gzip, deflate)."
)


@functools.cache
def document(*, needs_key: bool, protect_metrics: bool) -> bytes:
    """The document as JSON. `needs_key`: a request without an API key is refused; `protect_metrics`: also one for
    metrics."""
    types = _types()
    references, components = msgspec.json.schema_components(types, ref_template=_REF)
    schema_of = dict(zip(map(repr, types), references, strict=True))
    for operation in OPERATIONS:
        if operation.body is not None:
            name = operation.body.__name__
            components[name] = bounded(name, components[name])
    components |= refined(components)
    paths: dict[str, dict[str, Any]] = {}
    for operation in OPERATIONS:
        keyed = needs_key and (operation.keyed or (operation.path == "/metrics" and protect_metrics))
        paths.setdefault(operation.path, {})[operation.method] = _operation(operation, schema_of, keyed=keyed)
    made = orjson.dumps(
        {
            "openapi": "3.1.0",
            "info": {"title": "kvferry", "version": _VERSION, "description": _ABOUT},
            "paths": paths,
            "components": {
                "schemas": components,
                "securitySchemes": {
                    "bearer": {"type": "http", "scheme": "bearer"},
                    "api_key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
                },
            },
        }
    )
    # Types of the same name have their module's before it.
    return made.replace(b"router.http.", b"")


def _types() -> list[Any]:
    types: dict[str, Any] = {repr(Item): Item}
    for operation in OPERATIONS:
        for kind in (operation.body, operation.answer, operation.error, *operation.events):
            if kind is not None:
                types[repr(kind)] = kind
    return list(types.values())


def _operation(operation: Operation, schema_of: Mapping[str, Any], *, keyed: bool) -> dict[str, Any]:
    responses = {"200": _success(operation, schema_of)}
    for status in operation.statuses:
        responses[str(status)] = {
            "description": _ERRORS[status],
            "headers": _headers(_ERROR_HEADERS.get(status, {})),
            "content": {_JSON: {"schema": schema_of[repr(operation.error)]}},
        }
    made = {
        "operationId": operation.name,
        "summary": operation.summary,
        "security": list(_SECRETS) if keyed else [{}, *_SECRETS],
        "parameters": [dict(parameter) for parameter in operation.parameters],
        "responses": responses,
    }
    if operation.body is not None:
        made["requestBody"] = {"required": True, "content": {_JSON: {"schema": schema_of[repr(operation.body)]}}}
    return made


def _success(operation: Operation, schema_of: Mapping[str, Any]) -> dict[str, Any]:
    if operation.text:
        content: dict[str, Any] = {operation.text: {"schema": {"type": "string"}}}
    else:
        content = {_JSON: {"schema": schema_of[repr(operation.answer)]}}
    if operation.events:
        # OpenAPI 3.1 has no words for the data of events, so they are in a member of our own.
        of_event = {"anyOf": [schema_of[repr(kind)] for kind in operation.events]}
        content["text/event-stream"] = {"x-event-data": of_event}
    return {
        "description": f"{operation.summary}{_ON_STREAMS if operation.events else ''}",
        "headers": _headers(operation.answer_headers),
        "content": content,
    }


def _headers(headers: Mapping[str, str]) -> dict[str, Any]:
    return {name: {"description": text, "schema": {"type": "string"}} for name, text in headers.items()}
