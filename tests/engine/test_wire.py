"""The check at a worker's own door: a worker trusts no caller, not even a router."""

import math

import pytest

from engine.sequence import TokenSample
from engine.wire import DoorLimits, build_sequence, token_output, token_sample
from kvferry_rpc.common_pb2 import ErrorCode, LogitBias, SamplingParams
from kvferry_rpc.internal_pb2 import Admit, PrefillRequest
from runtime.errors import KvferryError

LIMITS = DoorLimits(vocab_size=50, max_context_tokens=32, eos_token_ids=frozenset({2}))


def admit(**changes: object) -> Admit:
    fields: dict[str, object] = {
        "request_id": "r",
        "attempt": 1,
        "prompt_token_ids": [3, 4, 5],
        "sampling": SamplingParams(max_tokens=4),
    }
    return Admit(**{**fields, **changes})  # type: ignore[arg-type]


def test_a_good_message_becomes_a_sequence_with_the_name_given() -> None:
    sequence = build_sequence(admit(attempt=3, num_output_tokens=1), LIMITS, "its name")
    assert sequence.seq_id == "its name"
    assert sequence.prompt_token_ids == (3, 4)
    assert sequence.output_token_ids == [5]
    assert sequence.eos_token_ids == {2}


def test_both_messages_that_bring_a_prompt_are_read_alike() -> None:
    prefill = PrefillRequest(
        request_id="r", attempt=1, prompt_token_ids=[3, 4, 5], sampling=SamplingParams(max_tokens=4, seed=9)
    )
    assert build_sequence(prefill, LIMITS, "s").sampling.seed == 9


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("request_id", {"request_id": ""}),
        ("request_id", {"request_id": "x" * 129}),
        ("request_id", {"attempt": 0}),
        ("prompt", {"prompt_token_ids": []}),
        ("prompt", {"prompt_token_ids": [50]}),
        ("cache_salt", {"cache_salt": b"x" * 65}),
        ("num_output_tokens", {"num_output_tokens": 3}),
        ("num_output_tokens", {"prompt_token_ids": [3] * 9, "num_output_tokens": 4}),
        ("max_tokens", {"sampling": SamplingParams()}),
        ("max_tokens", {"sampling": SamplingParams(max_tokens=33)}),
        ("min_tokens", {"sampling": SamplingParams(max_tokens=4, min_tokens=5)}),
        ("temperature", {"sampling": SamplingParams(max_tokens=4, temperature=math.nan)}),
        ("top_p", {"sampling": SamplingParams(max_tokens=4, top_p=0.0)}),
        ("min_p", {"sampling": SamplingParams(max_tokens=4, min_p=math.inf)}),
        ("repetition_penalty", {"sampling": SamplingParams(max_tokens=4, repetition_penalty=0.0)}),
        ("presence_penalty", {"sampling": SamplingParams(max_tokens=4, presence_penalty=-3.0)}),
        ("frequency_penalty", {"sampling": SamplingParams(max_tokens=4, frequency_penalty=math.nan)}),
        ("top_logprobs", {"sampling": SamplingParams(max_tokens=4, num_logprobs=21)}),
        ("prompt_logprobs", {"sampling": SamplingParams(max_tokens=4, prompt_logprobs=21)}),
        ("logit_bias", {"sampling": SamplingParams(max_tokens=4, logit_bias=[LogitBias(token_id=50)])}),
        ("logit_bias", {"sampling": SamplingParams(max_tokens=4, logit_bias=[LogitBias(bias=math.nan)])}),
        ("logit_bias", {"sampling": SamplingParams(max_tokens=4, logit_bias=[LogitBias(token_id=1)] * 2)}),
        ("logit_bias", {"sampling": SamplingParams(max_tokens=4, logit_bias=[LogitBias()] * 1025)}),
        ("stop_token_ids", {"sampling": SamplingParams(max_tokens=4, stop_token_ids=[50])}),
        ("stop_token_ids", {"sampling": SamplingParams(max_tokens=4, stop_token_ids=[1] * 129)}),
    ],
)
def test_each_bad_field_is_refused_by_name(field: str, changes: dict[str, object]) -> None:
    with pytest.raises(KvferryError) as refused:
        build_sequence(admit(**changes), LIMITS, "s")
    assert refused.value.code == ErrorCode.INVALID_REQUEST
    assert refused.value.field == field


def test_a_prompt_that_fills_the_context_is_refused_with_its_own_code() -> None:
    with pytest.raises(KvferryError) as refused:
        build_sequence(admit(prompt_token_ids=[3] * 32), LIMITS, "s")
    assert refused.value.code == ErrorCode.CONTEXT_LENGTH_EXCEEDED
    assert build_sequence(admit(prompt_token_ids=[3] * 31), LIMITS, "s").num_tokens == 31


@pytest.mark.parametrize(
    "sample", [TokenSample(7), TokenSample(7, -0.5, ()), TokenSample(7, -0.5, ((7, -0.5), (8, -2.0)))]
)
def test_a_sample_survives_the_wire(sample: TokenSample) -> None:
    message = token_output(4, sample)
    assert message.index == 4
    assert token_sample(message) == sample
