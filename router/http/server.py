"""The HTTP front door: OpenAI's API, and the endpoints of operation.

    GET  /v1/models, /v1/models/{id}     what is served here
    POST /v1/chat/completions            generation.py
    POST /v1/completions                 generation.py
    POST /tokenize                       token ids exactly as a generation would use them
    GET  /v1/receipts/{id}               the KV receipt of a recent request
    GET  /health                         this process is alive; says nothing of the workers
    GET  /ready                          requests can be served now, else 503 and the reason
    GET  /metrics                        Prometheus text

Every failure has OpenAI's shape, also those of paths and methods. `protocol.py` holds the socket side.
"""

import time
from collections.abc import Awaitable, Callable
from typing import Any

import orjson
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.routing import Route, Router

from router.generation_plan import check_model, tokenize_prompt
from router.http.asgi import Receive, Scope, Send, send_body
from router.http.errors import ClientGone, HttpError, to_http_error
from router.http.generation import CHAT, COMPLETIONS, GenerationEndpoint, RequestCap, token_ids_of
from router.http.json_body import BodyReader, decode_body
from router.http.openai_requests import TokenizeBody
from router.http.openai_responses import receipt_fields
from router.http.services import Services
from router.http.sse import ClientWatch

Endpoint = Callable[[Scope, Receive, Send], Awaitable[None]]


def build_app(services: Services) -> "HttpFrontDoor":
    """The ASGI application. One event loop runs it; it holds no thread and no state but counts."""
    return HttpFrontDoor(services)


class HttpFrontDoor:
    """Finds the endpoint for a path, and turns whatever it raises into an answer."""

    def __init__(self, services: Services) -> None:
        bodies = BodyReader()
        cap = RequestCap(services.max_requests)
        pages = _Pages(services, bodies, cap)
        chat = GenerationEndpoint(CHAT, services, bodies, cap)
        completions = GenerationEndpoint(COMPLETIONS, services, bodies, cap)
        self._router = Router(
            [
                _route("/v1/chat/completions", chat, "POST"),
                _route("/v1/completions", completions, "POST"),
                _route("/tokenize", pages.tokenize, "POST"),
                _route("/v1/models", pages.models, "GET"),
                _route("/v1/models/{model:path}", pages.model, "GET"),
                _route("/v1/receipts/{request_id}", pages.receipt, "GET"),
                _route("/health", pages.health, "GET"),
                _route("/ready", pages.ready, "GET"),
                _route("/metrics", pages.metrics, "GET"),
            ],
            redirect_slashes=False,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._router(scope, receive, send)
            return
        scope["app"] = self  # Tells Starlette to raise, not to answer in its own words.
        try:
            await self._router(scope, receive, send)
        except ClientGone:
            pass
        except HTTPException as error:
            await _send_error(send, _routing_error(error, scope))
        except Exception as problem:
            await _send_error(send, to_http_error(problem))


class _Pages:
    """The endpoints that generate nothing."""

    def __init__(self, services: Services, bodies: BodyReader, cap: RequestCap) -> None:
        self._services = services
        self._bodies = bodies
        self._cap = cap
        self._created = int(time.time())

    async def models(self, scope: Scope, receive: Receive, send: Send) -> None:
        await _send_json(send, {"object": "list", "data": [self._model()]})

    async def model(self, scope: Scope, receive: Receive, send: Send) -> None:
        check_model(scope["path_params"]["model"], self._services.limits())
        await _send_json(send, self._model())

    async def tokenize(self, scope: Scope, receive: Receive, send: Send) -> None:
        limits = self._services.limits()
        with self._cap:
            body = await decode_body(await self._bodies.read(Headers(scope=scope), receive), TokenizeBody)
            check_model(limits.model if body.model is None else body.model, limits)
            with ClientWatch(receive):
                token_ids = await token_ids_of(tokenize_prompt(body), self._services.tokenizer)
            answer = {
                "model": limits.model,
                "tokens": list(token_ids),
                "count": len(token_ids),
                "max_model_len": limits.max_context_tokens,
            }
            await _send_json(send, answer)

    async def receipt(self, scope: Scope, receive: Receive, send: Send) -> None:
        receipt = self._services.find_receipt(scope["path_params"]["request_id"])
        if receipt is None:
            raise HttpError(404, "No receipt is kept under this id.", code="receipt_not_found", param="id")
        await _send_json(send, receipt_fields(receipt))

    async def health(self, scope: Scope, receive: Receive, send: Send) -> None:
        await _send_json(send, {"status": "ok"})

    async def ready(self, scope: Scope, receive: Receive, send: Send) -> None:
        reason = "shutting down" if self._services.draining() else self._services.unready_reason()
        if reason is None:
            await _send_json(send, {"status": "ready"})
            return
        raise HttpError(
            503,
            f"Not ready: {reason}.",
            code="unavailable",
            kind="service_unavailable_error",
            headers={"retry-after": "1"},
        )

    async def metrics(self, scope: Scope, receive: Receive, send: Send) -> None:
        body, content_type = self._services.render_metrics()
        await send_body(send, 200, body, content_type=content_type.encode())

    def _model(self) -> dict[str, Any]:
        limits = self._services.limits()
        return {
            "id": limits.model,
            "object": "model",
            "created": self._created,
            "owned_by": "kvferry",
            "max_model_len": limits.max_context_tokens,
        }


class _Direct:
    """An endpoint without Starlette's request and response objects: it takes a plain class for an ASGI application,
    a function for one of its own."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._endpoint(scope, receive, send)


def _route(path: str, endpoint: Endpoint, method: str) -> Route:
    return Route(path, _Direct(endpoint), methods=[method])


def _routing_error(error: HTTPException, scope: Scope) -> HttpError:
    if error.status_code == 405:
        message = f"The method {scope['method']} is not allowed here."
        return HttpError(405, message, code="method_not_allowed", headers=error.headers)
    return HttpError(404, "There is nothing at this path.", code="not_found")


async def _send_json(send: Send, value: dict[str, Any]) -> None:
    await send_body(send, 200, orjson.dumps(value))


async def _send_error(send: Send, error: HttpError) -> None:
    headers = [(name.encode(), value.encode()) for name, value in error.headers.items()]
    await send_body(send, error.status, error.body(), headers=headers)
