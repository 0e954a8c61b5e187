"""The failover benchmark counts what goes wrong, finds late writers, and gets through a round with real processes."""

import json
from typing import cast

import pytest

from bench import failover
from bench.common.failover_cast import End
from bench.common.failover_messages import PREFILL, Happened, Setup
from bench.common.failover_pool import Pool
from bench.common.failover_round import Story
from bench.common.failover_streams import Heard, Loss, StreamRounds, _take
from bench.common.failover_streams import Tally as StreamTally

LAYOUT = failover.LAYOUT
SENDER, RECEIVER = cast(End, object()), cast(End, object())


def make_pool() -> Pool:
    return Pool(Setup(PREFILL, "tcp", LAYOUT, 4, 1.0, 1.0, 3, b"i" * 16))


def test_content_is_known_by_its_number_and_differs_from_any_other() -> None:
    pool = make_pool()
    blocks = pool.take(1, 2)
    assert blocks is not None
    assert not pool.holds(1, blocks)
    pool.fill(1, blocks)
    assert pool.holds(1, blocks)
    assert not pool.holds(2, blocks)
    assert not pool.holds(1, blocks[::-1])


def test_a_write_to_a_block_that_nobody_holds_is_found_once() -> None:
    pool = make_pool()
    blocks = pool.take(1, 3)
    assert blocks is not None
    pool.fill(1, blocks)
    pool.manager.free("1")
    pool.give_back(blocks)
    assert pool.audit(0).touched_blocks == 0
    pool.region.buffer[LAYOUT.page_offset(blocks[1], 5)] ^= 1
    found = pool.audit(0)
    assert (found.held_blocks, found.touched_blocks, found.fault) == (0, 1, "")
    assert pool.audit(0).touched_blocks == 0


def test_such_a_write_is_found_although_the_block_was_taken_again() -> None:
    pool = make_pool()
    pool.region.buffer[0] ^= 1
    blocks = pool.take(1, 4)
    assert blocks is not None
    pool.fill(1, blocks)
    found = pool.audit(0)
    assert (found.held_blocks, found.touched_blocks) == (4, 1)


def story(sent: list[str], received: list[str], *, right: bool = True) -> Story:
    told = Story(1, SENDER, RECEIVER)
    told.sent = [Happened(kind, 1, 0.0) for kind in sent]
    told.received = [Happened(kind, 1, 0.0, right) for kind in received]
    return told


@pytest.mark.parametrize(
    ("sent", "received"),
    [
        ([], []),
        (["Sent", "Drained"], ["Committed"]),
        (["Failed"], ["Failed", "Fenced"]),
        (["Failed", "Drained"], ["Committed"]),  # The sender could not know: the answer was lost with the link.
    ],
)
def test_these_endings_are_in_order(sent: list[str], received: list[str]) -> None:
    assert list(story(sent, received).faults()) == []


@pytest.mark.parametrize(
    ("sent", "received"),
    [
        (["Drained"], []),
        (["Sent", "Failed"], ["Committed"]),
        ([], ["Fenced", "Failed"]),
        ([], ["Committed", "Fenced"]),
        ([], ["Failed", "Failed"]),
        (["Sent", "Drained"], ["Failed", "Fenced"]),
    ],
)
def test_these_endings_are_faults(sent: list[str], received: list[str]) -> None:
    assert len(list(story(sent, received).faults())) == 1


def test_a_commit_with_another_content_is_a_fault() -> None:
    assert len(list(story([], ["Committed"], right=False).faults())) == 1


def test_a_hand_off_is_over_only_with_the_last_event_of_its_end() -> None:
    told = story(["Failed"], ["Failed", "Fenced"])
    assert told.over(RECEIVER)
    assert not told.over(SENDER)
    assert told.decided(SENDER)


def test_lines_count_and_rate_what_must_not_be() -> None:
    none = failover.count_line("hangs", "tcp:SIGKILL:decode", 0, "hand-offs", 200)
    some = failover.count_line("hangs", "tcp:SIGKILL:decode", 3, "hand-offs", 200)
    assert (none.value, none.ratio, some.value, some.ratio, some.n) == (0, 1.0, 3, 0.25, 200)
    slow = failover.detection_line(0.99, "v", [10.0] * 50 + [500.0] * 50, 2000.0, seed=1)
    assert (slow.metric, slow.value, slow.ratio, slow.n) == ("detect_ms_p99", 500.0, 4.0, 100)
    assert slow.ci95[0] <= slow.ratio <= slow.ci95[1]


def test_a_round_with_a_killed_decode_process_loses_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    failover.main(["--quick", "--rounds", "1", "--transports", "tcp", "--io-timeout-s", "20"])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    counts = {line["metric"]: line["value"] for line in lines if line["unit"] != "ms"}
    assert counts == {"wrong_answers": 0, "hangs": 0, "leaked_blocks": 0}
    assert {line["variant"] for line in lines} == {"tcp:SIGKILL:decode"}


def heard(
    *, text: str = "abc", error: str = "", gaps_s: tuple[float, ...] = (0.1, 0.01, 0.02), **receipt: object
) -> Heard:
    return Heard(text, "" if error else "length", error, list(gaps_s), list(range(len(gaps_s))), dict(receipt))


def test_a_stream_counts_as_equal_only_with_its_text_and_its_end() -> None:
    tally = StreamTally()
    rounds = StreamRounds.__new__(StreamRounds)
    for after in (heard(), heard(text="abd"), heard(text="ab"), heard(error="lost")):
        rounds._count(heard(), after, tally)
    assert (tally.streams, tally.equal, tally.errors) == (4, 1, 1)
    assert len(tally.wrong) == 3


def test_a_stream_was_disturbed_if_its_receipt_says_so() -> None:
    assert not heard(earlier_failures=[], migrations=[]).was_disturbed
    assert heard(earlier_failures=["attempt 1: lost"]).was_disturbed
    assert heard(migrations=[{"pause_ms": 2.5}]).pauses_ms == (2.5,)


def test_what_a_loss_added_stands_beside_a_new_request() -> None:
    losses = [Loss(0.010 * number, 0.020 * number) for number in range(1, 11)]
    line = failover.added_line(0.5, "decode:SIGKILL", losses, 1)
    assert (line.metric, line.baseline, line.n) == ("added_ms_p50", "full_recompute", 10)
    assert line.value == pytest.approx(55.0)
    assert line.ratio == pytest.approx(2.0)
    assert failover.added_line(0.99, "decode:SIGKILL", losses, 1).metric == "added_ms_p99"


def test_a_line_of_the_event_stream_adds_its_text_and_the_wait_for_it() -> None:
    got, last = Heard(), 0.0
    last = _take('data: {"choices": [{"text": "ab", "finish_reason": null}]}', got, last)
    last = _take('data: {"choices": [{"text": "", "finish_reason": "stop"}], "kv_receipt": {"attempt": 2}}', got, last)
    assert _take("data: [DONE]", got, last) == last
    assert (got.text, got.reason, got.chars, len(got.gaps_s)) == ("ab", "stop", [0], 1)
    assert got.receipt == {"attempt": 2}
    _take('data: {"error": {"message": "gone"}}', got, last)
    assert got.error == "gone"
