"""The decode worker's handler, event by event, with a scripted receiver."""

import pytest

from decode_worker.worker import SessionClosed
from engine.sequence import SamplingParams
from kvferry_rpc.common_pb2 import TokenOutput
from runtime.errors import ErrorCode, KvferryError
from tests.support.decode_bench import PROMPT, TOKEN
from tests.support.decode_bench import DecodeBench as Bench
from tests.support.scripted_handoffs import DIGEST
from tests.support.toy_model import VOCAB_SIZE


def only_live(bench: Bench) -> str:
    (handoff_id,) = bench.receiver.live
    return handoff_id


def test_a_request_hears_its_ticket_its_tokens_and_its_half_of_the_receipt() -> None:
    bench = Bench()
    bench.admit()
    bench.receiver.commit(only_live(bench), TOKEN)
    bench.deliver()
    bench.run()
    assert bench.kinds() == ["ticket", "verified", *["tokens"] * 4, "done"]
    verified = bench.heard[1][1].verified
    assert (verified.checksum_verified, verified.checksum, verified.cached_tokens) == (True, DIGEST, 0)
    done = bench.heard[1][-1].done
    assert done.commit_ms == verified.commit_ms
    assert done.checksum_verified
    assert done.checksum == DIGEST
    assert done.tokens_recomputed == 0
    bench.assert_whole()


def test_two_routers_may_use_the_same_request_id() -> None:
    bench = Bench(num_blocks=16)
    bench.admit("r", 1)
    bench.admit("r", 2)
    assert bench.kinds(1) == bench.kinds(2) == ["ticket"]
    bench.cancel("r", 2)
    bench.deliver()
    assert len(bench.receiver.live) == 1, "the other router's request goes on"
    bench.receiver.commit(only_live(bench), TOKEN)
    bench.receiver.fence(next(iter(bench.receiver.failed)))
    bench.deliver()
    bench.run()
    assert bench.kinds(1)[-1] == "done"
    assert bench.kinds(2) == ["ticket"]
    bench.assert_whole()


def test_a_cancel_from_another_session_changes_nothing() -> None:
    bench = Bench()
    bench.admit("r", 1)
    bench.cancel("r", 2)
    assert len(bench.receiver.live) == 1
    bench.worker.handle(SessionClosed(2))
    assert len(bench.receiver.live) == 1
    bench.worker.handle(SessionClosed(1))
    bench.receiver.fence(next(iter(bench.receiver.failed)))
    bench.deliver()
    bench.assert_whole()


@pytest.mark.parametrize("events", ["failed, fenced", "committed"])
def test_a_cancel_that_crosses_the_end_of_its_hand_off_frees_the_blocks_once(events: str) -> None:
    bench = Bench()
    bench.admit()
    handoff_id = only_live(bench)
    if events == "committed":
        bench.receiver.commit(handoff_id, TOKEN)
    else:
        bench.receiver.fail(handoff_id, KvferryError(ErrorCode.HANDOFF_FAILED, "scripted"))
        bench.receiver.fence(handoff_id)
    bench.cancel()
    bench.cancel()
    bench.deliver()
    assert bench.kinds() == ["ticket"]
    assert not bench.worker.has_work
    assert not bench.receiver.committed
    bench.assert_whole()


def test_a_writer_that_never_stops_costs_its_blocks_and_no_more() -> None:
    bench = Bench()
    bench.admit()
    handoff_id = only_live(bench)
    bench.cancel()
    bench.deliver()
    assert bench.toy.engine.usage().quarantined == 4
    bench.admit("s", local=True)
    bench.run()
    assert bench.kinds()[-1] == "done"
    bench.receiver.fence(handoff_id)
    bench.deliver()
    bench.assert_whole()


def test_a_deadline_while_blocks_are_received_is_said_once_and_the_commit_behind_it_is_ignored() -> None:
    bench = Bench()
    bench.admit()
    bench.receiver.commit(only_live(bench), TOKEN)
    bench.clock.advance(60.0)
    bench.worker.tick(bench.clock.now())
    bench.deliver()
    bench.worker.tick(bench.clock.now())
    assert bench.kinds() == ["ticket", "failed"]
    assert bench.heard[1][-1].failed.code == ErrorCode.DEADLINE_EXCEEDED
    bench.assert_whole()


def test_a_deadline_stops_a_sequence_that_decodes_and_is_said_once() -> None:
    bench = Bench()
    bench.admit(local=True)
    while bench.kinds()[-1:] != ["tokens"]:
        assert bench.worker.step()
    bench.clock.advance(60.0)
    bench.worker.tick(bench.clock.now())
    bench.worker.tick(bench.clock.now())
    assert not bench.worker.has_work
    assert bench.kinds()[-2:] == ["tokens", "failed"]
    assert bench.heard[1][-1].failed.code == ErrorCode.DEADLINE_EXCEEDED
    bench.assert_whole()


@pytest.mark.parametrize(
    ("first_token", "num_tokens"),
    [
        (b"\xff", None),
        (TokenOutput(token_id=VOCAB_SIZE).SerializeToString(), None),
        (TOKEN, len(PROMPT) - 1),
    ],
)
def test_a_commit_record_that_makes_no_sense_fails_its_request_only(first_token: bytes, num_tokens: int | None) -> None:
    bench = Bench(num_blocks=16)
    bench.admit("good")
    good = only_live(bench)
    bench.admit("bad")
    bad = next(key for key in bench.receiver.live if key != good)
    bench.receiver.commit(bad, first_token, num_tokens=num_tokens)
    bench.receiver.commit(good, TOKEN)
    bench.deliver()
    bench.run()
    ends = {event.request_id: event for event in bench.heard[1] if event.WhichOneof("kind") in ("done", "failed")}
    assert ends["bad"].failed.code == ErrorCode.HANDOFF_FAILED
    assert ends["good"].WhichOneof("kind") == "done"
    bench.assert_whole()


def test_a_failed_hand_off_never_enters_the_prefix_cache() -> None:
    bench = Bench()
    bench.admit()
    handoff_id = only_live(bench)
    bench.receiver.fail(handoff_id, KvferryError(ErrorCode.HANDOFF_FAILED, "scripted"))
    bench.receiver.fence(handoff_id)
    bench.deliver()
    assert bench.toy.engine.usage().cached == 0
    bench.admit("again")
    assert bench.heard[1][-1].ticket.first_block == 0, "nothing of it may be matched"
    bench.cancel("again")
    bench.receiver.fence(next(iter(bench.receiver.failed)))
    bench.deliver()
    bench.assert_whole()


def test_routers_learn_of_cached_blocks_also_when_no_step_follows() -> None:
    bench = Bench()
    bench.admit(max_tokens=1)
    bench.receiver.commit(only_live(bench), TOKEN)
    bench.deliver()
    bench.worker.tick(bench.clock.now())
    assert bench.kinds()[-1] == "done"
    told = [block_hash for block_hash, _ in bench.log.read(None, 0).changes]
    assert len(told) == 3
    assert told == list(bench.toy.blocks.snapshot_hashes())
    bench.assert_whole()


def test_a_receiver_that_refuses_leaves_no_block_reserved() -> None:
    bench = Bench()
    bench.receiver.refuse_next = KvferryError(ErrorCode.UNAVAILABLE, "closing")
    bench.admit()
    assert bench.kinds() == ["failed"]
    assert bench.heard[1][0].failed.code == ErrorCode.UNAVAILABLE
    bench.assert_whole()


def test_tokens_of_one_step_leave_in_one_message_a_session() -> None:
    bench = Bench(num_blocks=32)
    for name in "abc":
        bench.admit(name, local=True, max_tokens=3)
    bench.run()
    bench.messages = 0
    for name in "def":
        bench.admit(name, local=True, max_tokens=3)
    while bench.toy.engine.load().num_waiting:
        bench.worker.step()
    before = len(bench.heard[1])
    bench.messages = 0
    bench.worker.step()
    assert bench.messages == 1
    assert len(bench.heard[1]) - before >= 3
    bench.run()
    bench.assert_whole()


def test_tokens_that_were_guessed_right_leave_together_and_are_numbered_on() -> None:
    bench = Bench(num_blocks=16, speculative_tokens=4)
    # One token is by far the likeliest, so the text is that token over and over.
    bench.admit(sampling=SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True, logit_bias=((5, 90.0),)))
    bench.receiver.commit(only_live(bench), TOKEN)
    bench.deliver()
    bench.run()
    runs = [event.tokens.tokens for event in bench.heard[1] if event.WhichOneof("kind") == "tokens"]
    assert [token.token_id for run in runs for token in run] == [5] * 30
    assert [token.index for run in runs for token in run] == list(range(30))
    assert max(map(len, runs)) == 5
    load = bench.worker.view().load
    assert load.accepted_tokens == 30 - len(runs)
    assert bench.kinds()[-1] == "done"
    bench.assert_whole()
