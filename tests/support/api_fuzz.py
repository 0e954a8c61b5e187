"""Requests made from the served OpenAPI document, sent to a server, and its answers held against the document.

    fuzz = ApiFuzz(document, base_url, model)
    fuzz.run(num_cases, seed)        raises what the first bad answer is; `fuzz.statuses` counts the answers

Half of the requests keep to the document, half of them break it somewhere. No answer may be a 5xx, but 503, which says
that the cluster is not there, and 504 where the request asked for a deadline.
"""

import copy
import json
import random
from collections import Counter
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, Final

import jsonschema_rs
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis import Case, GenerationMode, Response
from schemathesis.specs.openapi import checks

MAX_ANSWER_TOKENS: Final = 16
TIMEOUT_S: Final = 60.0
_LENGTHS: Final = ("max_tokens", "max_completion_tokens", "max_output_tokens")
_CHECKS: Final = [
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
]
# How often an operation is asked; the others as often as `_LIGHT`.
_WEIGHTS: Final = {
    "/v1/chat/completions": 5.0,
    "/v1/completions": 4.0,
    "/v1/responses": 3.0,
    "/v1/messages": 3.0,
    "/tokenize": 2.0,
    "/v1/messages/count_tokens": 1.5,
}
_LIGHT: Final = 0.2
# One of these is needed, though each may be left out.
_ALTERNATIVES: Final = frozenset(["prompt", "messages"])
_MAX_FIELDS: Final = 8
_SOME_VOCABULARY: Final = 1000
CASES_A_ROUND: Final = 200


class ApiFuzz:
    """One server under fire. One thread."""

    def __init__(self, document: dict[str, Any], base_url: str, model: str) -> None:
        self._document = prepared(document, model)
        self._base_url = base_url
        self._session = requests.Session()
        self._event_validators = _validators_of_events(self._document)
        self.statuses: Counter[tuple[str, int]] = Counter()

    def run(self, num_cases: int, seed_value: int) -> None:
        """Send about so many requests. Raises the failure of the first answer that is wrong."""
        rng = random.Random(seed_value)
        num_rounds = max(1, round(num_cases / CASES_A_ROUND))
        with self._session:
            for _ in range(num_rounds):
                schema = schemathesis.openapi.from_dict(narrowed(self._document, rng))
                self._round(schema, num_cases / num_rounds, rng)

    def _round(self, schema: Any, num_cases: float, rng: random.Random) -> None:
        found = [result.ok() for result in schema.get_all_operations()]
        weights = [_WEIGHTS.get(operation.path, _LIGHT) for operation in found]
        for operation, weight in zip(found, weights, strict=True):
            modes = [GenerationMode.POSITIVE]
            if operation.method == "post":
                modes.append(GenerationMode.NEGATIVE)
            count = round(num_cases * weight / sum(weights) / len(modes))
            for mode in modes:
                self._send_many(operation, mode, max(1, count), rng.getrandbits(32))

    def _send_many(self, operation: Any, mode: GenerationMode, count: int, seed_value: int) -> None:
        strategy = operation.as_strategy(generation_mode=mode)
        if mode is GenerationMode.POSITIVE:
            strategy = strategy.map(_sensible)

        def send(case: Case) -> None:
            answer = case.call(base_url=self._base_url, session=self._session, timeout=TIMEOUT_S)
            self.check(case, answer, must_fail=mode is GenerationMode.NEGATIVE)

        many = settings(
            max_examples=count,
            database=None,
            deadline=None,
            derandomize=False,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        test: Callable[[], None] = many(seed(seed_value)(given(case=strategy)(send)))
        test()

    def check(self, case: Case, response: Response, *, must_fail: bool) -> None:
        """Raises what is wrong with an answer."""
        status = response.status_code
        self.statuses[case.operation.path, status] += 1
        allowed = {503, 504} if "x-request-timeout-ms" in (case.headers or {}) else {503}
        assert status < 500 or status in allowed, f"{status}: {case.as_curl_command()}\n{response.text}"
        # The others may have been put right in ways that their round's document does not know.
        # A body beyond the bound is refused before anybody has looked whether it is good.
        must_fail = must_fail and status != HTTPStatus.REQUEST_ENTITY_TOO_LARGE
        case.validate_response(response, checks=[*_CHECKS, checks.negative_data_rejection] if must_fail else _CHECKS)
        media_type = response.headers.get("content-type", [""])[0]
        if media_type.startswith("text/event-stream"):
            check_events(response.text, self._event_validators[case.operation.path])


def prepared(document: dict[str, Any], model: str) -> dict[str, Any]:
    """The document for tests: one model, and answers that may have nothing which is not in it."""
    made = copy.deepcopy(document)
    for component in made["components"]["schemas"].values():
        if "properties" in component:
            component.setdefault("additionalProperties", False)
    for path in made["paths"].values():
        for schema in _body_schemas(made, path):
            schema["properties"]["model"] = {"const": model}
    return made


def check_events(stream: str, validator: jsonschema_rs.Validator) -> None:
    """Raises unless each event is one of the document's, and the stream has an end."""
    assert stream.endswith("\n\n")
    blocks = [block for block in stream.removesuffix("\n\n").split("\n\n") if not block.startswith(":")]
    for number, block in enumerate(blocks):
        name, _, data = block.rpartition("data: ")
        if data == "[DONE]":
            assert number == len(blocks) - 1
            continue
        value = json.loads(data)
        validator.validate(value)
        assert name in ("", f"event: {value.get('type')}\n")


def narrowed(document: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """The same with few of the optional fields: all together they rarely make sense, and take long to make up."""
    made = copy.deepcopy(document)
    for path in made["paths"].values():
        for schema in _body_schemas(made, path):
            optional = sorted(set(schema["properties"]) - set(schema["required"]) - _ALTERNATIVES)
            dropped = set(optional) - set(rng.sample(optional, min(rng.randrange(_MAX_FIELDS), len(optional))))
            schema["properties"] = {name: it for name, it in schema["properties"].items() if name not in dropped}
    return made


def _sensible(case: Case) -> Case:
    """With a short answer, and what a schema cannot say, or says otherwise than programs do, put right."""
    body = _repaired(case.body)
    if isinstance(body, dict):
        for name in _LENGTHS:
            if isinstance(body.get(name), int):
                body[name] = body[name] % MAX_ANSWER_TOKENS + 1
        if body.get("stream_options") is not None:
            body["stream"] = True
        if "prompt" in body and case.operation.path in ("/v1/completions", "/tokenize"):
            body["prompt"] = _small_ids(body["prompt"]) or "Once"
        if case.operation.path.startswith("/v1/messages"):
            body["messages"].append({"role": "user", "content": "Go on."})
        case.body = body
    return case


def _repaired(value: Any) -> Any:
    """1 for 1.0, and arguments of calls that are JSON."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_repaired(item) for item in value]
    if isinstance(value, dict):
        return {name: "{}" if name == "arguments" else _repaired(item) for name, item in value.items()}
    return value


def _small_ids(prompt: Any) -> Any:
    if isinstance(prompt, list):
        return [_small_ids(item) for item in prompt]
    return prompt % _SOME_VOCABULARY if isinstance(prompt, int) else prompt


def _body_schemas(document: dict[str, Any], path: dict[str, Any]) -> list[dict[str, Any]]:
    """Those of the bodies of a path's operations."""
    found = []
    for operation in path.values():
        if "requestBody" in operation:
            name = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
            found.append(document["components"]["schemas"][name])
    return found


def validators_of_bodies(document: dict[str, Any]) -> dict[str, jsonschema_rs.Validator]:
    """By path: whether a body is one that the document allows there."""
    return {
        path: _validator(document, operation["requestBody"]["content"]["application/json"]["schema"])
        for path, operations in document["paths"].items()
        for operation in operations.values()
        if "requestBody" in operation
    }


def _validators_of_events(document: dict[str, Any]) -> dict[str, jsonschema_rs.Validator]:
    return {
        path: _validator(document, operation["responses"]["200"]["content"]["text/event-stream"]["x-event-data"])
        for path, operations in document["paths"].items()
        for operation in operations.values()
        if "text/event-stream" in operation["responses"]["200"]["content"]
    }


def _validator(document: dict[str, Any], schema: dict[str, Any]) -> jsonschema_rs.Validator:
    return jsonschema_rs.Draft202012Validator({**schema, "components": document["components"]})
