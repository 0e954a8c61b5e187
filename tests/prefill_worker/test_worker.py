"""The prefill worker's handler, event by event, with a scripted sender."""

import numpy as np
import pytest
from numpy.typing import NDArray

from prefill_worker.worker import Cancel, Constrain, Nudge
from runtime.errors import ErrorCode, KvferryError, invalid
from tests.support.prefill_bench import MODEL
from tests.support.prefill_bench import PrefillBench as Bench
from tests.support.scripted_handoffs import DIGEST

PROMPT = list(range(1, 31))
OTHER = list(range(31, 61))


def test_a_request_hears_its_token_and_then_its_half_of_the_receipt() -> None:
    bench = Bench()
    bench.submit(PROMPT, "a")
    bench.compute()
    assert bench.kinds() == ["first_token"]
    bench.sender.sent("a")
    assert bench.kinds() == ["first_token", "done"]
    assert bench.heard[0][1].done.checksum == DIGEST
    bench.deliver()
    bench.assert_whole()


def test_an_acknowledgement_that_comes_inside_the_commit_is_still_heard_last() -> None:
    bench = Bench()
    bench.sender.sent_at_once = True
    bench.submit(PROMPT, "a")
    bench.compute()
    assert bench.kinds() == ["first_token", "done"]
    bench.deliver()
    bench.assert_whole()


def test_a_second_call_with_the_same_ticket_is_refused_and_the_first_goes_on() -> None:
    bench = Bench()
    bench.submit(PROMPT, "a")
    bench.worker.step()
    second = bench.submit(PROMPT, "a")
    assert bench.error(1) == ErrorCode.INVALID_REQUEST
    bench.worker.handle(Cancel(second))  # its caller hangs up before it has read the refusal
    bench.compute()
    bench.sender.sent("a")
    bench.deliver()
    assert bench.kinds() == ["first_token", "done"]
    bench.assert_whole()


@pytest.mark.parametrize("refusal", [ValueError("no"), KvferryError(ErrorCode.UNAVAILABLE, "closing")])
def test_a_ticket_that_the_sender_refuses_leaves_nothing_queued(refusal: Exception) -> None:
    bench = Bench()
    bench.sender.refuse_next = refusal
    bench.submit(PROMPT, "a")
    assert bench.kinds() == ["error"]
    assert not bench.worker.has_work
    bench.assert_whole()


@pytest.mark.parametrize(
    ("handoff_id", "first_block", "blocks"), [("", 0, 4), ("x" * 257, 0, 4), ("a", 0, 3), ("a", 0, 5), ("a", 5, 0)]
)
def test_a_ticket_that_does_not_fit_is_refused_by_name(handoff_id: str, first_block: int, blocks: int) -> None:
    bench = Bench()
    bench.submit(PROMPT, handoff_id, first_block=first_block, blocks=blocks)
    assert bench.error() == ErrorCode.INVALID_REQUEST
    assert bench.heard[0][0].error.field == "ticket"
    assert not bench.sender.open_handoffs
    bench.assert_whole()


def test_blocks_of_a_cancelled_prompt_are_not_given_away_while_they_are_read() -> None:
    bench = Bench(num_blocks=4)
    submit = bench.submit(PROMPT, "a")
    bench.worker.step()
    bench.worker.handle(Cancel(submit))
    bench.submit(OTHER, "b")
    bench.compute()
    assert bench.kinds(1) == [], "there was no room for it"
    bench.sender.drain("a")
    bench.deliver()
    bench.compute()
    assert bench.kinds(1) == ["first_token"]
    assert bench.kinds(0) == []
    bench.sender.sent("b")
    bench.deliver()
    bench.assert_whole()


@pytest.mark.parametrize("moment", ["queued", "between chunks", "before the acknowledgement", "after it"])
def test_a_cancel_at_any_moment_ends_one_request_once(moment: str) -> None:
    bench = Bench()
    submit = bench.submit(PROMPT, "a")
    if moment == "between chunks":
        bench.worker.step()
    elif moment != "queued":
        bench.compute()
    if moment == "after it":
        bench.sender.sent("a")
    before = bench.kinds()
    bench.worker.handle(Cancel(submit))
    bench.worker.handle(Cancel(submit))
    bench.deliver()
    if "a" in bench.sender.open_handoffs:
        assert bench.sender.open_handoffs["a"].over
        bench.sender.drain("a")
    bench.deliver()
    bench.worker.handle(Cancel(submit))
    assert bench.kinds() == before
    assert not bench.worker.has_work
    bench.assert_whole()


def test_a_commit_that_races_a_cancel_and_wins_is_not_counted_as_lost() -> None:
    bench = Bench()
    submit = bench.submit(PROMPT, "a")
    bench.compute()
    bench.sender.sent("a")
    bench.worker.handle(Cancel(submit))
    bench.deliver()
    view = bench.worker.view()
    assert (view.handoffs_committed, view.handoffs_failed) == (1, 0)
    bench.assert_whole()


def test_a_deadline_after_the_last_word_says_nothing_more() -> None:
    bench = Bench()
    bench.submit(PROMPT, "a")
    bench.compute()
    bench.sender.sent("a")
    bench.clock.advance(60.0)
    bench.worker.tick(bench.clock.now())  # before Sent has been handled
    bench.deliver()
    assert bench.kinds() == ["first_token", "done"]
    bench.assert_whole()


def test_a_deadline_stops_the_compute_and_is_said_once() -> None:
    bench = Bench()
    bench.submit(PROMPT, "a")
    bench.worker.step()
    bench.clock.advance(60.0)
    bench.worker.tick(bench.clock.now())
    bench.worker.tick(bench.clock.now())
    bench.deliver()
    assert not bench.worker.has_work
    assert bench.kinds() == ["error"]
    assert bench.error() == ErrorCode.DEADLINE_EXCEEDED
    bench.sender.drain("a")
    bench.deliver()
    bench.assert_whole()


def test_a_sequence_that_fails_is_answered_and_its_hand_off_given_up() -> None:
    bench = Bench()
    bench.toy.model.nan_token_ids = frozenset({30})
    try:
        bench.submit(PROMPT, "a")
        bench.compute()
    finally:
        bench.toy.model.nan_token_ids = frozenset()
    assert bench.kinds() == ["error"]
    assert bench.sender.open_handoffs["a"].over
    bench.sender.drain("a")
    bench.deliver()
    bench.assert_whole()


def test_a_cached_prefix_is_pushed_once_whole_and_not_computed() -> None:
    bench = Bench()
    bench.submit(PROMPT, "a")
    bench.compute()
    bench.sender.sent("a")
    bench.deliver()
    bench.submit([*PROMPT[:24], 60], "b")
    bench.compute()
    assert len(bench.sender.open_handoffs["b"].pushed) == 4
    bench.sender.sent("b")
    bench.deliver()
    assert bench.heard[1][1].done.cached_tokens == 24
    assert bench.toy.engine.load().prompt_tokens_computed == len(PROMPT) + 1
    bench.assert_whole()


def test_a_sequence_whose_link_is_behind_waits_and_others_are_computed_meanwhile() -> None:
    bench = Bench()
    bench.submit(PROMPT, "a")
    bench.submit(OTHER, "b")
    bench.worker.step()
    bench.sender.behind = {"a"}
    bench.compute()
    assert bench.kinds(0) == []
    assert bench.kinds(1) == ["first_token"]
    assert bench.toy.engine.load().prompt_tokens_computed == 8 + len(OTHER)
    bench.sender.behind = set()
    bench.worker.handle(Nudge())
    bench.compute()
    assert bench.kinds(0) == ["first_token"]
    bench.sender.sent("a")
    bench.sender.sent("b")
    bench.deliver()
    bench.assert_whole()


def test_a_sequence_that_waits_for_its_link_can_be_cancelled() -> None:
    bench = Bench()
    submit = bench.submit(PROMPT, "a")
    bench.worker.step()
    bench.sender.behind = {"a"}
    assert not bench.worker.step()
    assert bench.worker.has_work
    bench.worker.handle(Cancel(submit))
    bench.sender.drain("a")
    bench.deliver()
    assert not bench.worker.has_work
    bench.assert_whole()


def test_a_ticket_may_be_for_blocks_of_another_size() -> None:
    bench = Bench()
    other = MODEL.layout(16).to_proto()
    bench.submit(PROMPT, "a", blocks=4, layout=other)
    assert bench.error() == ErrorCode.INVALID_REQUEST
    bench.submit(PROMPT, "b", blocks=2, layout=other)
    assert bench.kinds(1) == []
    bench.worker.handle(Cancel(bench.calls[1]))
    bench.sender.drain("b")
    bench.deliver()
    bench.assert_whole()


def test_a_request_waits_for_its_constraint_with_its_hand_off_open_and_others_go_on() -> None:
    bench = Bench()
    submit = bench.submit(PROMPT, "a", awaits_constraint=True)
    bench.submit(OTHER, "b")
    bench.compute()
    assert (bench.kinds(0), bench.kinds(1)) == ([], ["first_token"])
    assert "a" in bench.sender.open_handoffs
    constraint = OnlyToken(5)
    bench.worker.handle(Constrain(submit, constraint))
    bench.compute()
    assert bench.heard[0][0].first_token.token_id == 5
    for handoff_id in ("a", "b"):
        bench.sender.sent(handoff_id)
    bench.deliver()
    bench.assert_whole()


def test_a_request_whose_grammar_cannot_be_used_ends_with_the_reason() -> None:
    bench = Bench()
    submit = bench.submit(PROMPT, "a", awaits_constraint=True)
    bench.worker.handle(Constrain(submit, invalid("grammar", "is wrong")))
    assert bench.error() == ErrorCode.INVALID_REQUEST
    bench.deliver()
    bench.worker.handle(Constrain(submit, OnlyToken(5)))  # too late: no harm
    bench.assert_whole()


class OnlyToken:
    """A constraint that allows one token, always."""

    def __init__(self, token_id: int) -> None:
        self._bits = np.zeros(8, dtype=np.uint32)  # 256 tokens: more than the toy has
        self._bits[token_id // 32] = 1 << (token_id % 32)

    def allowed(self) -> NDArray[np.uint32]:
        return self._bits

    def advance(self, token_id: int) -> None:
        return None

    def rewind(self, num_tokens: int) -> None:
        return None
