"""What an attempt has heard from its two workers: the inbox that their events go to."""

import asyncio

import pytest

from kvferry_rpc.common_pb2 import Error, ErrorCode, FinishReason, TokenOutput
from kvferry_rpc.internal_pb2 import (
    DecodeDone,
    DecodeEvent,
    HandoffVerified,
    Paused,
    PrefillDone,
    PrefillEvent,
    Tokens,
)
from router.dispatch.inbox import Inbox
from runtime.clock import ManualClock
from runtime.errors import KvferryError

CLOCK = ManualClock()


def decode_tokens(*indices: int, token_id: int = 5) -> DecodeEvent:
    return DecodeEvent(tokens=Tokens(tokens=[TokenOutput(index=index, token_id=token_id) for index in indices]))


def first_token(index: int, token_id: int = 5) -> PrefillEvent:
    return PrefillEvent(first_token=TokenOutput(index=index, token_id=token_id))


def taken(inbox: Inbox) -> list[int]:
    return [token.index for token in inbox.take_tokens()]


def test_the_first_token_comes_from_both_workers_and_is_given_out_once() -> None:
    inbox = Inbox(0, CLOCK)
    inbox.put_prefill(first_token(0))
    assert taken(inbox) == [0]
    inbox.put_decode(decode_tokens(0, 1))
    assert taken(inbox) == [1]
    assert taken(inbox) == []


def test_decode_may_be_faster_than_the_prefill_workers_own_message() -> None:
    inbox = Inbox(0, CLOCK)
    inbox.put_decode(decode_tokens(0, 1, 2))
    assert taken(inbox) == [0, 1, 2]
    inbox.put_prefill(first_token(0))
    assert taken(inbox) == []


def test_tokens_of_many_messages_leave_in_one_batch() -> None:
    inbox = Inbox(3, CLOCK)
    for index in range(3, 10):
        inbox.put_decode(decode_tokens(index))
    assert taken(inbox) == list(range(3, 10))


def test_a_token_is_held_back_until_the_one_before_it_is_there() -> None:
    inbox = Inbox(0, CLOCK)
    inbox.put_decode(decode_tokens(1, 2))
    assert taken(inbox) == []
    assert inbox.has_gap
    inbox.put_prefill(first_token(0))
    assert taken(inbox) == [0, 1, 2]
    assert not inbox.has_gap


def test_workers_that_disagree_on_the_first_token_are_a_defect() -> None:
    inbox = Inbox(0, CLOCK)
    inbox.put_prefill(first_token(0, token_id=5))
    inbox.put_decode(decode_tokens(0, token_id=6))
    assert inbox.decode_failure is not None
    assert inbox.decode_failure.code == ErrorCode.INTERNAL


def test_the_first_failure_of_a_side_stays_and_none_counts_after_done() -> None:
    inbox = Inbox(0, CLOCK)
    inbox.put_decode(DecodeEvent(failed=Error(code=ErrorCode.HANDOFF_FAILED, message="first")))
    inbox.put_decode(DecodeEvent(failed=Error(code=ErrorCode.INTERNAL, message="second")))
    assert inbox.decode_failure is not None
    assert inbox.decode_failure.message == "first"
    inbox.put_prefill(PrefillEvent(done=PrefillDone()))
    inbox.put_prefill_failure(KvferryError(ErrorCode.UNAVAILABLE, "late"))
    assert inbox.prefill_failure is None


@pytest.mark.parametrize("code", [ErrorCode.CANCELLED, ErrorCode.UNAUTHENTICATED])
def test_what_a_worker_says_of_its_own_troubles_is_not_the_clients_fault(code: "ErrorCode.ValueType") -> None:
    inbox = Inbox(0, CLOCK)
    inbox.put_decode(DecodeEvent(failed=Error(code=code)))
    inbox.put_prefill(PrefillEvent(error=Error(code=code)))
    assert inbox.decode_failure is not None
    assert inbox.prefill_failure is not None
    assert inbox.decode_failure.code == inbox.prefill_failure.code == ErrorCode.UNAVAILABLE


async def test_wait_returns_for_every_change_and_only_then() -> None:
    inbox = Inbox(0, CLOCK)
    waiting = asyncio.create_task(inbox.wait())
    await asyncio.sleep(0)
    assert not waiting.done()
    inbox.put_decode(DecodeEvent(done=DecodeDone(reason=FinishReason.STOP)))
    await asyncio.wait_for(waiting, 5)
    again = asyncio.create_task(inbox.wait())
    await asyncio.sleep(0)
    assert not again.done()
    again.cancel()


def test_the_word_that_the_kv_is_here_is_kept_with_its_time_and_makes_the_prefill_worker_dispensable() -> None:
    inbox = Inbox(0, CLOCK)
    assert inbox.lacks_a_half
    inbox.put_decode(DecodeEvent(verified=HandoffVerified(checksum=b"digest")))
    assert inbox.verified is not None
    assert (inbox.verified.checksum, inbox.verified_at) == (b"digest", CLOCK.now())
    assert inbox.decode_started
    assert taken(inbox) == []
    assert inbox.lacks_a_half
    inbox.put_prefill(PrefillEvent(done=PrefillDone()))
    assert not inbox.lacks_a_half


def test_the_token_that_a_move_repeats_is_not_given_out_again_but_compared() -> None:
    inbox = Inbox(4, CLOCK, first_token_id=5)
    inbox.put_decode(decode_tokens(4, 5))
    assert taken(inbox) == [5]
    assert inbox.decode_failure is None
    inbox = Inbox(4, CLOCK, first_token_id=6)
    inbox.put_decode(decode_tokens(4))
    assert inbox.decode_failure is not None
    assert "disagree" in inbox.decode_failure.message


def test_a_pause_and_its_refusal_and_the_end_by_a_move_are_kept() -> None:
    inbox = Inbox(0, CLOCK)
    inbox.put_decode(DecodeEvent(paused=Paused()))
    assert inbox.is_paused
    inbox.put_decode(DecodeEvent(resumed=Error(code=ErrorCode.HANDOFF_FAILED, message="not now")))
    assert not inbox.is_paused
    assert inbox.refusal_to_pause is not None
    inbox.put_decode(DecodeEvent(handed_over=PrefillDone(blocks_sent=3)))
    assert inbox.handed_over is not None
    assert inbox.decode_failure is None
