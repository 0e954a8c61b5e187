"""The official `openai` package against a real cluster."""

import asyncio
import json
from collections.abc import AsyncIterator

import httpx
import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI, BadRequestError, NotFoundError

from tests.support.live_cluster import LiveCluster

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]
MODEL = "tiny-real"
STORY = [{"role": "user", "content": "Tell me a story."}]


@pytest.fixture
async def client(cluster: LiveCluster) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{cluster.base_url}/v1", api_key="none", max_retries=0) as client:
        yield client


async def test_the_model_is_listed(client: AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == [MODEL]


async def test_a_streamed_answer_is_the_buffered_answer_with_one_end_and_usage(client: AsyncOpenAI) -> None:
    buffered = await client.chat.completions.create(model=MODEL, messages=STORY, temperature=0, max_tokens=24)
    stream = await client.chat.completions.create(
        model=MODEL, messages=STORY, temperature=0, max_tokens=24, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == buffered.choices[0].message.content
    assert text.strip()
    ends = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices and chunk.choices[0].finish_reason]
    assert ends == [buffered.choices[0].finish_reason]
    assert buffered.usage is not None
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == buffered.usage.completion_tokens
    assert chunks[-1].usage.prompt_tokens == buffered.usage.prompt_tokens


async def test_choices_of_one_request_differ_and_a_seed_repeats_them(client: AsyncOpenAI) -> None:
    async def ask() -> list[str | None]:
        answer = await client.chat.completions.create(
            model=MODEL, messages=STORY, n=2, seed=5, temperature=1.5, max_tokens=24
        )
        assert [choice.index for choice in answer.choices] == [0, 1]
        return [choice.message.content for choice in answer.choices]

    first = await ask()
    assert first[0] != first[1]
    assert await ask() == first


async def test_logprobs_come_for_each_token_with_the_chosen_one_on_top_when_greedy(client: AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model=MODEL, messages=STORY, temperature=0, max_tokens=8, logprobs=True, top_logprobs=3
    )
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content
    assert content is not None
    assert answer.usage is not None
    assert len(content) == answer.usage.completion_tokens
    for entry in content:
        assert entry.logprob <= 0
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].token == entry.token


async def test_newer_apis_give_the_text_of_a_chat_streamed_and_whole(cluster: LiveCluster, client: AsyncOpenAI) -> None:
    chat = await client.chat.completions.create(model=MODEL, messages=STORY, temperature=0, max_tokens=24)
    text = chat.choices[0].message.content
    asked = {"model": MODEL, "temperature": 0, "max_output_tokens": 24}
    response = await client.responses.create(input=STORY, **asked)
    async with client.responses.stream(input=STORY, **asked) as stream:
        streamed = [event async for event in stream][-1].response
    assert response.output_text == streamed.output_text == text
    assert response.status == streamed.status
    assert response.usage is not None
    assert response.usage.output_tokens == chat.usage.completion_tokens
    asked = {"model": MODEL, "messages": STORY, "max_tokens": 24, "extra_body": {"temperature": 0}}
    async with AsyncAnthropic(base_url=cluster.base_url, api_key="none", max_retries=0) as other:
        message = await other.messages.create(**asked)
        async with other.messages.stream(**asked) as stream:
            assert await stream.get_final_text() == message.content[0].text == text
    usage = message.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == chat.usage.prompt_tokens


async def test_a_stop_string_cuts_the_answer_before_it(client: AsyncOpenAI) -> None:
    whole = await client.completions.create(model=MODEL, prompt="CHAPTER VII\n", temperature=0, max_tokens=24)
    text = whole.choices[0].text
    stop = text[len(text) // 2 : len(text) // 2 + 4]
    cut = await client.completions.create(model=MODEL, prompt="CHAPTER VII\n", temperature=0, max_tokens=24, stop=stop)
    assert cut.choices[0].text == text[: text.index(stop)]
    assert cut.choices[0].finish_reason == "stop"


async def test_a_repeated_prompt_reports_its_cached_tokens_once(client: AsyncOpenAI) -> None:
    prompt = "The quick brown fox jumps over the lazy dog, and the dog does not mind at all. " * 4
    cached = []
    for _ in range(2):
        answer = await client.completions.create(model=MODEL, prompt=prompt, temperature=0, max_tokens=2)
        assert answer.usage is not None
        details = answer.usage.prompt_tokens_details
        cached.append(details.cached_tokens if details else None)
        length = answer.usage.prompt_tokens
    assert cached[0] == 0
    assert cached[1] is not None
    assert 0 < cached[1] <= length // 16 * 16


async def test_echo_and_lists_of_prompts_give_one_choice_each(client: AsyncOpenAI) -> None:
    answer = await client.completions.create(
        model=MODEL, prompt=["Once upon", "The end"], temperature=0, max_tokens=4, echo=True
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.choices[0].text.startswith("Once upon")


async def test_a_prompt_beyond_the_context_is_refused_before_any_header(client: AsyncOpenAI) -> None:
    with pytest.raises(BadRequestError) as refused:
        await client.completions.create(model=MODEL, prompt=[5] * 5000, max_tokens=1, stream=True)
    assert refused.value.code == "context_length_exceeded"


async def test_an_unknown_model_is_not_found(client: AsyncOpenAI) -> None:
    with pytest.raises(NotFoundError):
        await client.completions.create(model="nothing", prompt="Hi")


async def test_the_receipt_proves_the_hand_off(cluster: LiveCluster) -> None:
    body = {"model": MODEL, "prompt": "A receipt, please: " * 5, "max_tokens": 4, "kv_receipt": True}
    async with httpx.AsyncClient(base_url=cluster.base_url, timeout=60) as http:
        answer = (await http.post("/v1/completions", json=body)).json()
        receipt = answer["kv_receipt"]
        kept = (await http.get(f"/v1/receipts/{answer['id']}")).json()
    assert receipt["prefill_worker"] == "prefill-0"
    assert receipt["decode_worker"].startswith("decode-")
    assert receipt["transport"] == "shm"
    assert receipt["checksum_verified"] is True
    assert receipt["tokens_recomputed"] == 0
    assert receipt["blocks_sent"] > 0
    assert receipt["bytes_sent"] > 0
    assert kept == receipt


async def test_health_readiness_and_metrics_answer(cluster: LiveCluster) -> None:
    async with httpx.AsyncClient(base_url=cluster.base_url, timeout=60) as http:
        assert (await http.get("/health")).status_code == 200
        assert (await http.get("/ready")).status_code == 200
        metrics = (await http.get("/metrics")).text
    assert "kvferry_" in metrics
    assert "# TYPE" in metrics


# The values of each field as they stand in the body.
BAD_VALUES = {
    "temperature": ("NaN", "Infinity", "1e309", '"0.7"', "true", "[]", "-1", "99"),
    "top_p": ("NaN", "0", "-0.5", "2", '"x"'),
    "max_tokens": ("0", "-1", "1e9", "2.5", '"3"', "99999999999999999999"),
    "n": ("0", "-1", "1000000", "1.5"),
    "stop": ("5", '["a", 5]', json.dumps(["x"] * 1000), json.dumps("y" * 10**6)),
    "logit_bias": ('{"999999999": 1}', '{"-1": 1}', '{"abc": 1}', '{"5": 1e9}', '{"5": NaN}'),
    "prompt": ("[]", "[[]]", "[[-1]]", "[1.5]", '[[1], "a"]', "null", "{}", '"\\ud800"'),
    "seed": ("1.5", '"x"', "-1"),
    "presence_penalty": ("NaN", "9"),
    "top_k": ("-1", "1.5"),
    "min_p": ("NaN", "2"),
    "model": ('"nothing"', "5", "null"),
    "best_of": ("1000000",),
    "logprobs": ("1000000",),
    "tools": ("[]",),
    "no_such_field": ("1",),
}


@pytest.mark.parametrize("field", BAD_VALUES)
async def test_bad_input_gets_a_4xx_in_openai_shape(cluster: LiveCluster, field: str) -> None:
    async with httpx.AsyncClient(base_url=cluster.base_url, timeout=60) as http:
        for value in BAD_VALUES[field]:
            fields = {"model": f'"{MODEL}"', "prompt": '"Hi"', "max_tokens": "2", field: value}
            body = "{" + ", ".join(f'"{name}": {value}' for name, value in fields.items()) + "}"
            answer = await http.post(
                "/v1/completions", content=body.encode(), headers={"content-type": "application/json"}
            )
            assert 400 <= answer.status_code < 500, (value[:60], answer.text)
            assert set(answer.json()["error"]) >= {"message", "type", "param", "code"}, value[:60]
        good = await http.post("/v1/completions", json={"model": MODEL, "prompt": "Hi", "max_tokens": 1})
        assert good.status_code == 200


async def test_a_huge_body_and_invalid_utf8_are_refused_while_a_stream_flows(
    cluster: LiveCluster, client: AsyncOpenAI
) -> None:
    stream = await client.completions.create(
        model=MODEL, prompt="Tell", max_tokens=48, stream=True, extra_body={"ignore_eos": True}
    )
    reading = asyncio.create_task(_count(stream))
    headers = {"content-type": "application/json"}
    async with httpx.AsyncClient(base_url=cluster.base_url, timeout=60) as http:
        huge = await http.post("/v1/completions", content=b'{"prompt": "' + b"x" * 10**7 + b'"}', headers=headers)
        broken = await http.post("/v1/completions", content=b'{"model": "\xff\xfe"}', headers=headers)
        deep = await http.post("/v1/completions", content=b'{"prompt": ' + b"[" * 100_000, headers=headers)
    assert (huge.status_code, broken.status_code, deep.status_code) == (413, 400, 400)
    assert await reading >= 2


async def _count(stream: AsyncIterator[object]) -> int:
    return len([item async for item in stream])
