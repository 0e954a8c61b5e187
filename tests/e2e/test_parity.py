"""Every field of a generation request gives one answer, whether a prompt is computed elsewhere or not.

The same request goes to the front door of an engine in this process, without any worker, and to a cluster that computes
prompts on one worker and generates on another. docs/api.md says of each field whether it is here.
"""

import json
from typing import Any

import httpx
import msgspec
import pytest

from router.http.openai_requests import ChatBody, CompletionBody
from tests.support.engine_source import EngineSource
from tests.support.http_door import Door, says
from tests.support.live_cluster import TINY_REAL, LiveCluster, models_beside

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
# Some blocks and a part of one, so that there is something to hand over.
TEXT = "CHAPTER I. Alice was beginning to get very tired of sitting by her sister on the bank, and of having nothing"
MESSAGES = [{"role": "system", "content": "You are a cat."}, {"role": "user", "content": TEXT}]
IDS = [300 + 7 * i % 150 for i in range(50)]
DRAWN = {"temperature": 1.3, "seed": 11, "max_tokens": 24}

# Of both endpoints.
COMMON: dict[str, dict[str, Any]] = {
    "max_tokens": {"max_tokens": 5, "temperature": 0},
    "temperature 0": {"temperature": 0, "max_tokens": 24},
    "temperature": DRAWN,
    "seed": {"seed": 2**63 - 1, "max_tokens": 24},
    "top_p": DRAWN | {"top_p": 0.7},
    "top_k": DRAWN | {"top_k": 5},
    "min_p": DRAWN | {"min_p": 0.1},
    "presence_penalty": DRAWN | {"presence_penalty": 1.5},
    "frequency_penalty": DRAWN | {"frequency_penalty": -0.5},
    "repetition_penalty": DRAWN | {"repetition_penalty": 1.4},
    "logit_bias": DRAWN | {"logit_bias": {"320": 8, "400": -100}},
    "min_tokens": DRAWN | {"min_tokens": 20, "logit_bias": {"2": 30}},
    "ignore_eos": DRAWN | {"ignore_eos": True, "logit_bias": {"2": 5}},
    "stop": DRAWN | {"stop": ["e", "\n"]},
    "stop_token_ids": DRAWN | {"stop_token_ids": list(range(330, 400))},
    "n": DRAWN | {"n": 3},
    "stream": DRAWN | {"stream": True},
    "stream_options": DRAWN | {"stream": True, "stream_options": {"include_usage": True}},
    "prompt_logprobs": DRAWN | {"prompt_logprobs": 4},
    "user": DRAWN | {"user": "u"},
}
CHATS = {
    "messages": {"temperature": 0, "max_tokens": 8, "messages": [{"role": "user", "content": "Hi"}]},
    "max_completion_tokens": {"max_completion_tokens": 6, "temperature": 0},
    "logprobs": DRAWN | {"logprobs": True},
    "top_logprobs": DRAWN | {"logprobs": True, "top_logprobs": 5},
}
TEXTS = {
    "prompt": {"prompt": IDS, "temperature": 0},
    "prompt of several": DRAWN | {"prompt": [TEXT, "Off with her head!"], "n": 2},
    "prompt of token ids": DRAWN | {"prompt": [IDS, IDS[:7]], "echo": True, "logprobs": 1},
    "logprobs": DRAWN | {"logprobs": 3},
    "echo": DRAWN | {"echo": True},
    "echo and logprobs": DRAWN | {"echo": True, "logprobs": 2, "stop": ["e"]},
    "echo streamed": DRAWN | {"echo": True, "logprobs": 2, "stream": True, "stream_options": {"include_usage": True}},
    "echo alone": {"echo": True, "logprobs": 2, "max_tokens": 0},
    "best_of": DRAWN | {"best_of": 4, "n": 2},
}
CASES = [
    *(pytest.param(CHAT, fields, id=f"chat {name}") for name, fields in {**COMMON, **CHATS}.items()),
    *(pytest.param(COMPLETIONS, fields, id=f"completion {name}") for name, fields in {**COMMON, **TEXTS}.items()),
]
# What says nothing about the text, or has tests of its own.
ELSEWHERE = {
    "model",
    "response_format",
    "structured_outputs",
    "tools",
    "tool_choice",
    "kv_receipt",
    "cache_salt",
    "priority",
    "slo",
    # Without effect.
    "metadata",
    "parallel_tool_calls",
    "prompt_cache_key",
    "modalities",
    "safety_identifier",
    "service_tier",
    "store",
}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> EngineSource:
    return EngineSource(TINY_REAL, models_beside(tmp_path_factory.getbasetemp() / "parity"))


def test_every_field_is_in_the_table() -> None:
    for cases, kind in (({**COMMON, **CHATS}, ChatBody), ({**COMMON, **TEXTS}, CompletionBody)):
        info = msgspec.inspect.type_info(kind)
        assert isinstance(info, msgspec.inspect.StructType)
        known = {field.name for field in info.fields if not isinstance(field.type, msgspec.inspect.NoneType)}
        asked = {"messages", "prompt", *(name for fields in cases.values() for name in fields)} & known
        assert known - asked - ELSEWHERE == set()


@pytest.mark.parametrize(("path", "fields"), CASES)
async def test_the_answer_is_that_of_a_single_process(
    engine: EngineSource, shared_cluster: LiveCluster, path: str, fields: dict[str, Any]
) -> None:
    base = {"messages": MESSAGES} if path == CHAT else {"prompt": TEXT}
    body = {"model": "tiny-real", "kv_receipt": True, **base, **fields}
    single = await Door(says(""), source=engine).post(path, body)
    async with httpx.AsyncClient(base_url=shared_cluster.base_url, timeout=60) as client:
        split = await client.post(path, json=body)
    assert (single.status_code, split.status_code) == (200, 200), (single.text, split.text)
    expected, actual = answer_of(single), answer_of(split)
    assert (expected.pop("moved"), actual.pop("moved")) == (False, True)
    assert_alike(actual, expected)
    if fields.get("prompt_logprobs") is not None or (fields.get("echo") and fields.get("logprobs") is not None):
        assert actual["cached_tokens"] == expected["cached_tokens"] == 0


def answer_of(response: httpx.Response) -> dict[str, Any]:
    """What an answer says, without its name and its costs. Streams are joined, choice by choice."""
    if not response.headers["content-type"].startswith("text/event-stream"):
        answer = response.json()
    else:
        *events, done = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line.startswith("data")]
        assert done == "[DONE]"
        answer = joined([json.loads(event) for event in events])
    receipt = answer.pop("kv_receipt")
    usage = answer.pop("usage", None) or {}
    return {
        "choices": answer["choices"],
        "prompt_logprobs": answer.get("prompt_logprobs"),
        "moved": receipt["transport"] != "local",
        "cached_tokens": usage.pop("prompt_tokens_details", {}).get("cached_tokens"),
        "usage": usage,
    }


def joined(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    answer: dict[str, Any] = {"choices": {}}
    for chunk in chunks:
        answer |= {name: chunk[name] for name in ("usage", "kv_receipt") if chunk.get(name)}
        for choice in chunk["choices"]:
            empty = {"text": "", "logprobs": [], "finish_reason": None}
            whole = answer["choices"].setdefault(str(choice["index"]), empty)
            whole["text"] += choice.get("text") or choice.get("delta", {}).get("content") or ""
            whole["finish_reason"] = choice["finish_reason"] or whole["finish_reason"]
            # Which tokens share a chunk is a matter of time.
            for name, values in sorted((choice["logprobs"] or {}).items()):
                whole["logprobs"] += [[name, value] for value in values or []]
    for whole in answer["choices"].values():
        whole["logprobs"].sort(key=lambda entry: entry[0])
    return answer


def assert_alike(actual: Any, expected: Any, where: str = "answer") -> None:
    """Equal but for the last digits of log probabilities. What came out of a cache hangs on what was asked before."""
    if isinstance(expected, dict):
        assert isinstance(actual, dict), where
        assert sorted(actual) == sorted(expected), where
        for name in expected:
            if name != "cached_tokens":
                assert_alike(actual[name], expected[name], f"{where}.{name}")
    elif isinstance(expected, list):
        assert len(actual) == len(expected), where
        for index, (left, right) in enumerate(zip(actual, expected, strict=True)):
            assert_alike(left, right, f"{where}[{index}]")
    elif isinstance(expected, float):
        assert actual == pytest.approx(expected, abs=1e-3), where
    else:
        assert actual == expected, where
