"""What a body means: values carried over, defaults, limits, and requests built from a plan."""

import json
from typing import Any

import pytest

from kvferry_rpc.common_pb2 import ErrorCode
from router.generation import GenerationRequest
from router.http.json_body import decode
from router.http.openai_requests import ChatBody, CompletionBody
from router.plans.generation_plan import (
    GenerationPlan,
    ModelLimits,
    RequestScope,
    build_requests,
    plan_chat,
    plan_completion,
)
from runtime.errors import KvferryError
from runtime.limits import (
    MAX_CHOICES,
    MAX_LOGIT_BIAS,
    MAX_MESSAGES,
    MAX_PROMPTS,
    MAX_STOP_CHARS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKENS,
    MAX_TOP_LOGPROBS,
)

LIMITS = ModelLimits(model="m", vocab_size=1000, max_context_tokens=512)
SCOPE = RequestScope("id", deadline=9.0, cache_salt=b"salt")


def chat(**fields: Any) -> GenerationPlan:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], **fields}
    return plan_chat(decode(json.dumps(body).encode(), ChatBody), LIMITS)


def completion(**fields: Any) -> GenerationPlan:
    body = {"model": "m", "prompt": "x", **fields}
    return plan_completion(decode(json.dumps(body).encode(), CompletionBody), LIMITS)


def requests(plan: GenerationPlan, *prompt_lengths: int) -> list[GenerationRequest]:
    return build_requests(plan, [[5] * length for length in prompt_lengths or (3,)], LIMITS, SCOPE)


def refused(call: Any, **fields: Any) -> KvferryError:
    with pytest.raises(KvferryError) as caught:
        call(**fields)
    return caught.value


def test_all_sampling_fields_arrive() -> None:
    plan = chat(
        temperature=0.5, top_p=0.25, top_k=7, min_p=0.125, repetition_penalty=1.5, presence_penalty=-0.5,
        frequency_penalty=0.75, min_tokens=2, ignore_eos=True, stop_token_ids=[4, 5], seed=11, max_tokens=20,
        logit_bias={"3": -1, "999": 2.5}, logprobs=True, top_logprobs=3, stop=["a", "b"],
    )  # fmt: skip
    (request,) = requests(plan)
    params = request.sampling
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.25, 7, 0.125)
    assert (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (1.5, -0.5, 0.75)
    assert (params.min_tokens, params.max_tokens, params.ignore_eos, params.seed) == (2, 20, True, 11)
    assert list(params.stop_token_ids) == [4, 5]
    assert [(entry.token_id, entry.bias) for entry in params.logit_bias] == [(3, -1.0), (999, 2.5)]
    assert params.num_logprobs == 3
    assert (request.stop, request.deadline, request.cache_salt) == (("a", "b"), 9.0, b"salt")


def test_absent_fields_stay_absent() -> None:
    params = chat().sampling
    assert not any(params.HasField(field) for field in ("temperature", "top_p", "repetition_penalty", "num_logprobs"))
    assert chat(temperature=0).sampling.HasField("temperature")
    assert chat(logprobs=True).sampling.HasField("num_logprobs")
    assert not chat(logprobs=False).sampling.HasField("num_logprobs")


def test_without_max_tokens_a_chat_may_fill_the_context_and_a_completion_gets_sixteen() -> None:
    assert requests(chat(), 12)[0].sampling.max_tokens == 500
    assert requests(completion(), 12)[0].sampling.max_tokens == 16
    assert requests(completion(), 510)[0].sampling.max_tokens == 2


@pytest.mark.parametrize("call", [chat, completion])
@pytest.mark.parametrize(("prompt", "max_tokens"), [(510, 2), (511, 1), (512, None), (512, 1), (100_000, None)])
def test_the_context_has_room_for_prompt_and_answer_or_the_request_is_refused(
    call: Any, prompt: int, max_tokens: int | None
) -> None:
    plan = call(max_tokens=max_tokens)
    if prompt < 512:
        assert requests(plan, prompt)[0].sampling.max_tokens == max_tokens
        error = refused(lambda: requests(call(max_tokens=(max_tokens or 0) + 1), prompt))
        assert error.field == "max_tokens"
    else:
        error = refused(lambda: requests(plan, prompt))
        assert error.field in ("messages", "prompt")
        assert str(prompt) in error.message
    assert error.code == ErrorCode.CONTEXT_LENGTH_EXCEEDED
    assert "512" in error.message


def test_a_huge_max_tokens_is_a_matter_of_the_context() -> None:
    error = refused(lambda: requests(chat(max_completion_tokens=2**31 - 1)))
    assert (error.code, error.field) == (ErrorCode.CONTEXT_LENGTH_EXCEEDED, "max_completion_tokens")


def test_min_tokens_must_fit_too() -> None:
    assert refused(chat, max_tokens=5, min_tokens=6).field == "min_tokens"
    assert refused(lambda: requests(chat(min_tokens=10), 510)).field == "min_tokens"


def test_choices_have_ids_and_seeds_of_their_own() -> None:
    built = requests(completion(prompt=[[1, 2], [3]], n=2, seed=7), 2, 1)
    assert [request.request_id for request in built] == ["id", "id-1", "id-2", "id-3"]
    assert [request.sampling.seed for request in built] == [7, 8, 9, 10]
    assert [len(request.prompt_token_ids) for request in built] == [2, 2, 1, 1]
    drawn = {request.sampling.seed for request in requests(chat(n=8))}
    assert len(drawn) == 8
    assert requests(chat(seed=2**63 - 1, n=2))[1].sampling.seed == 2**63


def test_the_two_names_of_max_tokens_may_not_disagree() -> None:
    assert chat(max_tokens=4, max_completion_tokens=4).max_tokens == 4
    assert refused(chat, max_tokens=4, max_completion_tokens=5).field == "max_completion_tokens"


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("text", ("text",)),
        ("", ("",)),
        (["a", "b"], ("a", "b")),
        ([1, 2], ((1, 2),)),
        ([[1, 2], [3]], ((1, 2), (3,))),
    ],
)
def test_the_four_shapes_of_a_prompt(prompt: Any, expected: Any) -> None:
    assert completion(prompt=prompt).prompts == expected


@pytest.mark.parametrize(
    "prompt",
    [[], [[]], [[-1]], [-1], [[1], "a"], [1, "a"], [1.5], [True], [[True]], [[1.5]], [[[1]]], [None], [{}], 5, None,
     {}, [1000], [[1000]], [10**30], [1, [2]]],
)  # fmt: skip
def test_other_prompts_are_refused_by_name(prompt: Any) -> None:
    assert refused(completion, prompt=prompt).field.partition("[")[0] == "prompt"


def test_an_empty_prompt_without_a_first_token_is_refused() -> None:
    assert refused(lambda: build_requests(completion(prompt=""), [[]], LIMITS, SCOPE)).field == "prompt"


@pytest.mark.parametrize(
    ("call", "field", "limit", "value"),
    [
        (chat, "n", MAX_CHOICES, 10**6),
        (completion, "n", MAX_CHOICES, 10**6),
        (completion, "best_of", MAX_CHOICES, 10**6),
        (completion, "prompt_logprobs", MAX_TOP_LOGPROBS, 10**6),
        (chat, "prompt_logprobs", MAX_TOP_LOGPROBS, 10**6),
        (completion, "prompt", MAX_PROMPTS, ["a"] * 100_000),
        (chat, "messages", MAX_MESSAGES, [{"role": "user", "content": ""}] * (MAX_MESSAGES + 1)),
        (chat, "stop", MAX_STOP_STRINGS, ["a"] * 10_000),
        (chat, "stop", MAX_STOP_CHARS, "a" * 10**6),
        (chat, "stop_token_ids", MAX_STOP_TOKENS, [1] * (MAX_STOP_TOKENS + 1)),
        (chat, "top_logprobs", MAX_TOP_LOGPROBS, 10**6),
        (completion, "logprobs", MAX_TOP_LOGPROBS, 10**6),
        (chat, "logit_bias", MAX_LOGIT_BIAS, {str(key): 0 for key in range(100_000)}),
    ],
)
def test_every_multiplier_has_a_limit_which_the_refusal_states(call: Any, field: str, limit: int, value: Any) -> None:
    error = refused(call, **{field: value})
    assert error.field == field
    assert str(limit) in error.message


def test_prompts_times_choices_are_limited() -> None:
    assert len(requests(completion(prompt=["a"] * 8, n=2), *[1] * 8)) == 16
    assert refused(completion, prompt=["a"] * 8, n=3).field == "n"


@pytest.mark.parametrize(
    "bias",
    [{"1000": 1}, {"999999999": 1}, {"-1": 1}, {"abc": 1}, {"1.0": 1}, {"": 1}, {"1": 1e9}, {"1": float("nan")},
     {"1": 1, "01": 1}, {"9" * 50: 1}, {"\u0661": 1}, {"1": "1"}, {"1": True}, {"1": None}],
)  # fmt: skip
def test_a_bad_logit_bias_is_refused(bias: dict[str, Any]) -> None:
    assert refused(chat, logit_bias=bias).field == "logit_bias"


def test_combinations_that_mean_nothing_are_refused() -> None:
    assert refused(chat, top_logprobs=2).field == "top_logprobs"
    assert refused(chat, stream_options={"include_usage": True}).field == "stream_options"
    assert refused(completion, best_of=1, n=2).field == "best_of"
    assert refused(chat, store=True).field == "store"


@pytest.mark.parametrize(
    "extra",
    [{"user": "u"}, {"store": False}, {"metadata": {"a": "b"}}, {"service_tier": "auto"}, {"modalities": ["text"]},
     {"parallel_tool_calls": False}, {"tool_choice": "none"}, {"response_format": {"type": "text"}},
     {"safety_identifier": "s"}, {"prompt_cache_key": "k"}],
)  # fmt: skip
def test_fields_that_ask_for_nothing_are_taken(extra: dict[str, Any]) -> None:
    assert chat(**extra) == chat()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", [{"type": "wibble"}]),
        ("tools", []),
        ("functions", [{"name": "f", "parameters": 1}]),
        ("function_call", "auto"),
        ("tool_choice", "auto"),
        ("response_format", {"type": "xml"}),
        ("response_format", {"type": "json_schema", "json_schema": {}}),
        ("audio", {"voice": "x"}),
        ("modalities", ["text", "audio"]),
        ("chat_template_kwargs", {"tokenize": True}),
        ("continue_final_message", True),
        ("reasoning_effort", "high"),
        ("guided_regex", "["),
        ("service_tier", "priority"),
        ("suffix", "x"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(field: str, value: Any) -> None:
    assert refused(chat, **{field: value}).field.partition(".")[0].partition("[")[0] == field


def test_a_suffix_is_refused() -> None:
    assert refused(completion, suffix="x").field == "suffix"


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "http://127.0.0.1/"}},
        {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}},
        {"type": "file", "file": {"file_id": "x"}},
        {"type": "text", "text": "x", "image_url": "file:///etc/passwd"},
    ],
)
def test_parts_that_are_not_text_are_refused(part: dict[str, Any]) -> None:
    error = refused(chat, messages=[{"role": "user", "content": [{"type": "text", "text": "x"}, part]}])
    assert error.field.startswith("messages[0].content[1].")


def test_text_parts_are_joined_with_nothing_between() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    plan = chat(messages=[{"role": "user", "content": parts}])
    assert plan.prompts[0].messages[0].text() == "ab"  # type: ignore[union-attr]


def test_an_answer_can_be_sent_back_as_it_came() -> None:
    answer = {
        "role": "assistant", "content": "x", "refusal": None, "annotations": None, "audio": None,
        "function_call": None, "tool_calls": None,
    }  # fmt: skip
    assert chat(messages=[{"role": "user", "content": "q"}, answer]).num_choices == 1


def test_another_model_is_unknown() -> None:
    assert refused(chat, model="gpt").code == ErrorCode.UNKNOWN_MODEL
