"""What clients write stays out of the logs, also where a worker refuses or fails a request, and out of its peer's."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from engine.sequence import TokenConstraint
from engine.wire import build_constraint, build_sequence
from kv_transfer.faults import FaultPlan
from kvferry_rpc.common_pb2 import ErrorCode, Grammar, SamplingParams
from kvferry_rpc.internal_pb2 import Admit
from prefill_worker.job import Submit
from prefill_worker.worker import Constrain
from runtime.errors import KvferryError, invalid
from tests.support.pair_checks import TOKENS, greedy
from tests.support.worker_pair import WorkerPair

MARK = "xyzzyMARKplugh"
PROMPT = TOKENS[:21]
WORDS = (MARK, ", ".join(map(str, PROMPT[:5])))


def check_logs(caplog: pytest.LogCaptureFixture, expected: str) -> None:
    """They say that something happened, and not a word of what the client wrote."""
    assert expected in caplog.text
    for word in WORDS:
        assert word not in caplog.text


def test_a_grammar_refused_in_mid_hand_off_is_quoted_to_its_client_alone(
    checkpoint: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    with WorkerPair(checkpoint, cache) as pair:
        request = pair.admit(PROMPT, greedy(), cache_salt=MARK.encode())
        ticket = request.ticket()
        assert ticket is not None
        sequence, now = build_sequence(request.message, pair.plan.limits, ticket.handoff_id), pair.clock.now()
        submit = Submit(sequence, ticket, now, now + 30.0, request.on_prefill, awaits_constraint=True)
        pair.prefill.submit(submit)
        pair.prefill.notify(Constrain(submit, invalid("response_format", f"cannot be compiled: {MARK}")))
        outcome = request.wait()
    assert outcome.prefill_error is not None
    assert MARK in outcome.prefill_error.message
    assert outcome.decode_error is not None
    assert MARK not in outcome.decode_error.message
    check_logs(caplog, "given up: invalid_request: response_format")


def test_a_hand_off_that_fails_and_a_deadline_that_passes_say_nothing_of_the_prompt(
    checkpoint: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    with WorkerPair(checkpoint, cache, faults=FaultPlan(corrupt_at_post=1)) as pair:
        outcome = pair.run(PROMPT, greedy(), cache_salt=MARK.encode())
        assert outcome.decode_error is not None
        request = pair.admit(PROMPT, greedy(), cache_salt=MARK.encode(), deadline_s=0.0)
        request.ticket()
        assert request.wait(prefill=False).decode_error is not None
    assert "deadline_exceeded" in caplog.text
    check_logs(caplog, "given up: handoff_failed")


class Failing:
    """A compiler that can do nothing."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    async def constraint(self, grammar: Grammar, output_token_ids: Sequence[int] = ()) -> TokenConstraint:
        raise self._error


async def test_a_compiler_that_breaks_is_logged_by_the_kind_and_place_of_its_failure(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("DEBUG")
    sampling = SamplingParams(grammar=Grammar(kind=Grammar.REGEX, text=MARK))
    message = Admit(request_id="r", attempt=1, prompt_token_ids=PROMPT, sampling=sampling)
    error = await build_constraint(message, Failing(RuntimeError(f"cannot read {MARK}")))
    assert isinstance(error, KvferryError)
    assert error.code == ErrorCode.INTERNAL
    assert MARK not in error.message
    check_logs(caplog, "RuntimeError")
