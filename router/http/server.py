"""The HTTP front door: OpenAI's API, and the endpoints of operation.

    GET  /v1/models, /v1/models/{id}     what is served here
    POST /v1/chat/completions            generation.py
    POST /v1/completions                 generation.py
    POST /v1/responses                   generation.py
    POST /v1/messages                    generation.py
    POST /v1/messages/count_tokens       how long the prompt of such a request is
    POST /tokenize                       token ids exactly as a generation would use them
    GET  /v1/receipts/{id}               the KV receipt of a recent request
    GET  /debug/requests                 what each request waits for, since when; the last that ended
    GET  /ui, /ui/{name}                 ui.py: the live page
    GET  /ui/state, /ui/events           ui.py: its data
    GET  /health                         this process is alive; says nothing of the workers
    GET  /ready                          requests can be served now, else 503 and the reason
    GET  /metrics                        Prometheus text
    GET  /openapi.json                   all this as an OpenAPI document

Where there are API keys, everything but health, readiness, the files of the live page and (unless it is protected)
metrics needs one; who showed it is `scope["tenant"]` from then on.

Every failure has OpenAI's shape, also those of paths and methods, but Anthropic's below /v1/messages. `protocol.py`
holds the socket side.
"""

import time
from collections.abc import Awaitable, Callable
from typing import Any

import orjson
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.routing import Route, Router

from router.http.anthropic_endpoint import MESSAGES, PATH, counted_prompt, is_messages_path, messages_error
from router.http.anthropic_requests import CountBody
from router.http.asgi import TENANT, Receive, Scope, Send, send_body, tenant_of
from router.http.debug_requests import DebugRequests
from router.http.errors import ClientGone, HttpError, to_http_error
from router.http.generation import GenerationEndpoint, token_ids_of
from router.http.json_body import BodyReader, decode_body
from router.http.openai_endpoints import CHAT, COMPLETIONS
from router.http.openai_requests import TokenizeBody
from router.http.openai_responses import receipt_fields
from router.http.openapi import document
from router.http.responses_endpoint import RESPONSES
from router.http.services import Services
from router.http.sse import ClientWatch
from router.http.ui import LiveUi
from router.plans.generation_plan import check_model, tokenize_prompt
from router.tenants import key_of

Endpoint = Callable[[Scope, Receive, Send], Awaitable[None]]


def build_app(services: Services) -> "HttpFrontDoor":
    """The ASGI application. One event loop runs it; it holds no thread and no state but counts."""
    return HttpFrontDoor(services)


class HttpFrontDoor:
    """Finds the endpoint for a path, and turns whatever it raises into an answer."""

    def __init__(self, services: Services) -> None:
        bodies = BodyReader()
        pages = _Pages(services, bodies)
        ui = LiveUi(services.live_page)
        route = _Routes(services)
        chat = GenerationEndpoint(CHAT, services, bodies)
        completions = GenerationEndpoint(COMPLETIONS, services, bodies)
        responses = GenerationEndpoint(RESPONSES, services, bodies)
        messages = GenerationEndpoint(MESSAGES, services, bodies)
        self._router = Router(
            [
                route.generation("/v1/chat/completions", chat),
                route.generation("/v1/completions", completions),
                route.generation("/v1/responses", responses),
                route.generation(PATH, messages),
                route.keyed(f"{PATH}/count_tokens", pages.count_tokens, "POST"),
                route.keyed("/tokenize", pages.tokenize, "POST"),
                route.keyed("/v1/models", pages.models, "GET"),
                route.keyed("/v1/models/{model:path}", pages.model, "GET"),
                route.keyed("/v1/receipts/{request_id}", pages.receipt, "GET"),
                route.keyed("/debug/requests", DebugRequests(services).__call__, "GET"),
                route.open("/ui", ui.index, "GET"),
                route.keyed("/ui/state", ui.state, "GET"),
                route.keyed("/ui/events", ui.events, "GET"),
                route.open("/ui/{name}", ui.asset, "GET"),
                route.open("/health", pages.health, "GET"),
                route.open("/ready", pages.ready, "GET"),
                (route.keyed if services.protect_metrics else route.open)("/metrics", pages.metrics, "GET"),
                route.open("/openapi.json", pages.openapi, "GET"),
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
            await _send_error(send, _routing_error(error, scope), scope)
        except Exception as problem:
            await _send_error(send, to_http_error(problem), scope)


class _Pages:
    """The endpoints that generate nothing."""

    def __init__(self, services: Services, bodies: BodyReader) -> None:
        self._services = services
        self._bodies = bodies
        self._created = int(time.time())
        self._document = document(needs_key=services.tenants.needs_key, protect_metrics=services.protect_metrics)

    async def models(self, scope: Scope, receive: Receive, send: Send) -> None:
        await _send_json(send, {"object": "list", "data": [self._model()]})

    async def model(self, scope: Scope, receive: Receive, send: Send) -> None:
        check_model(scope["path_params"]["model"], self._services.limits())
        await _send_json(send, self._model())

    async def tokenize(self, scope: Scope, receive: Receive, send: Send) -> None:
        limits = self._services.limits()
        with self._services.cap:
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

    async def count_tokens(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._services.cap:
            body = await decode_body(await self._bodies.read(Headers(scope=scope), receive), CountBody)
            prompt, fields = counted_prompt(body, self._services.limits())
            with ClientWatch(receive), fields.applied():
                token_ids = await token_ids_of(prompt, self._services.tokenizer)
            await _send_json(send, {"input_tokens": len(token_ids)})

    async def receipt(self, scope: Scope, receive: Receive, send: Send) -> None:
        receipt = self._services.find_receipt(scope["path_params"]["request_id"], tenant_of(scope).name)
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

    async def openapi(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_body(send, 200, self._document)

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


class _Routes:
    """Makes routes that know who asks before their endpoint does: before a byte of the body is read."""

    def __init__(self, services: Services) -> None:
        self._services = services

    def open(self, path: str, endpoint: Endpoint, method: str) -> Route:
        """For everybody."""
        return Route(path, _Direct(endpoint), methods=[method])

    def keyed(self, path: str, endpoint: Endpoint, method: str) -> Route:
        """For those with a key, where there are keys."""

        async def with_key(scope: Scope, receive: Receive, send: Send) -> None:
            self._authenticate(scope)
            await endpoint(scope, receive, send)

        return self.open(path, with_key, method)

    def generation(self, path: str, endpoint: Endpoint) -> Route:
        """The same for what counts as a request, also when it is refused for its key."""

        async def with_key(scope: Scope, receive: Receive, send: Send) -> None:
            with self._services.at_door():
                self._authenticate(scope)
            await endpoint(scope, receive, send)

        return self.open(path, with_key, "POST")

    def _authenticate(self, scope: Scope) -> None:
        """Raises KvferryError (UNAUTHENTICATED)."""
        headers = Headers(scope=scope)
        key = key_of(headers.get("authorization"), headers.get("x-api-key"))
        scope[TENANT] = self._services.tenants.authenticate(key)


def _routing_error(error: HTTPException, scope: Scope) -> HttpError:
    if error.status_code == 405:
        message = f"The method {scope['method']} is not allowed here."
        return HttpError(405, message, code="method_not_allowed", headers=error.headers)
    return HttpError(404, "There is nothing at this path.", code="not_found")


async def _send_json(send: Send, value: dict[str, Any]) -> None:
    await send_body(send, 200, orjson.dumps(value))


async def _send_error(send: Send, error: HttpError, scope: Scope) -> None:
    headers = [(name.encode(), value.encode()) for name, value in error.headers.items()]
    body = messages_error(error) if is_messages_path(scope["path"]) else error.body()
    await send_body(send, error.status, body, headers=headers)
