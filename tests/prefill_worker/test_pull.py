"""A prompt whose beginning a decode worker holds: pulled, or computed after all, event by event."""

import pytest

from kv_cache.block_hash import BlockHasher
from kvferry_rpc.internal_pb2 import KVSource, PrefillDone, Ticket
from prefill_worker.worker import Cancel
from runtime.errors import ErrorCode, KvferryError
from tests.support.prefill_bench import MODEL, PrefillBench
from tests.support.scripted_handoffs import ScriptedReceiver

PROMPT = list(range(1, 31))  # three full blocks of 8, and 6 tokens
ALL = KVSource(decode_worker="decode-0", num_tokens=24)


def names(prompt: list[int], salt: bytes = b"") -> list[bytes]:
    return BlockHasher.for_layout(MODEL.layout(8)).hash_blocks(prompt, salt)


def pulling(bench: PrefillBench, handoff_id: str = "a", source: KVSource = ALL) -> Ticket:
    """A request that waits for its pull, and the ticket of that."""
    bench.submit(PROMPT, handoff_id, source=source)
    assert bench.kinds(-1) == ["pull"]
    ticket = bench.heard[-1][0].pull
    assert ticket.handoff_id in bench.receiver.live
    assert not bench.worker.step(), "it waits"
    return ticket


def finish(bench: PrefillBench, handoff_id: str = "a", call: int = -1) -> PrefillDone:
    """Compute and send what is left; its half of the receipt."""
    bench.compute()
    bench.sender.sent(handoff_id)
    bench.deliver()
    assert bench.kinds(call)[-2:] == ["first_token", "done"]
    return bench.heard[call][-1].done


def computed(bench: PrefillBench) -> int:
    return bench.toy.engine.load().prompt_tokens_computed


def test_pulled_blocks_are_found_like_cached_ones_and_only_the_rest_is_computed() -> None:
    bench = PrefillBench()
    ticket = pulling(bench)
    assert (ticket.first_block, len(ticket.block_ids)) == (0, 3)
    bench.clock.advance(0.5)
    bench.receiver.commit(ticket.handoff_id, names(PROMPT)[2])
    bench.deliver()
    done = finish(bench)
    assert computed(bench) == 6
    assert (done.cached_tokens, done.pulled_tokens) == (24, 24)
    assert done.pull_ms == pytest.approx(500)
    assert done.wait_ms == pytest.approx(500)
    assert not bench.receiver.committed, "the receiver was told to forget it"
    bench.assert_whole()


def test_only_what_is_missing_is_pulled_and_counted() -> None:
    bench = PrefillBench()
    bench.submit([*PROMPT[:16], 60], "first")
    finish(bench, "first")
    before = computed(bench)
    ticket = pulling(bench)
    assert (ticket.first_block, len(ticket.block_ids)) == (2, 1)
    bench.receiver.commit(ticket.handoff_id, names(PROMPT)[2])
    bench.deliver()
    done = finish(bench)
    assert (done.cached_tokens, done.pulled_tokens) == (24, 8)
    assert computed(bench) == before + 6
    bench.assert_whole()


@pytest.mark.parametrize("num_tokens", [0, 7, 16, 17])
def test_a_source_that_holds_no_more_than_this_worker_is_not_asked(num_tokens: int) -> None:
    bench = PrefillBench()
    bench.submit([*PROMPT[:16], 60], "first")
    finish(bench, "first")
    bench.submit(PROMPT, "a", source=KVSource(decode_worker="d", num_tokens=num_tokens))
    done = finish(bench)
    assert "pull" not in bench.kinds(1)
    assert (done.pulled_tokens, done.pull_ms) == (0, 0.0)
    bench.assert_whole()


def test_the_last_token_is_computed_whatever_the_source_holds() -> None:
    bench = PrefillBench()
    bench.submit(PROMPT[:24], "a", source=KVSource(decode_worker="d", num_tokens=4000))
    ticket = bench.heard[0][0].pull
    assert len(ticket.block_ids) == 2
    bench.receiver.commit(ticket.handoff_id, names(PROMPT)[1])
    bench.deliver()
    assert finish(bench).pulled_tokens == 16
    assert computed(bench) == 8
    bench.assert_whole()


def test_a_pull_that_fails_costs_its_request_nothing_but_time_and_its_blocks_wait_for_the_fence() -> None:
    bench = PrefillBench(num_blocks=8)
    ticket = pulling(bench)
    bench.receiver.fail(ticket.handoff_id, KvferryError(ErrorCode.HANDOFF_FAILED, "evicted"))
    bench.deliver()
    done = finish(bench)
    assert (done.cached_tokens, done.pulled_tokens) == (0, 0)
    assert computed(bench) == 30
    bench.receiver.check()
    assert not bench.toy.engine.is_idle
    bench.receiver.fence(ticket.handoff_id)
    bench.deliver()
    bench.assert_whole()


def test_a_source_that_never_answers_is_given_up_and_not_asked_again_for_a_while() -> None:
    bench = PrefillBench()
    ticket = pulling(bench)
    bench.clock.advance(2.5)
    bench.worker.tick(bench.clock.now())
    bench.deliver()
    bench.receiver.fence(ticket.handoff_id)
    bench.deliver()
    assert finish(bench).pulled_tokens == 0
    other = [*PROMPT[::-1]]
    bench.submit(other, "b", source=ALL)
    assert bench.kinds(1) == []
    bench.submit(other, "c", source=KVSource(decode_worker="decode-1", num_tokens=24))
    assert bench.kinds(2) == ["pull"], "another worker has done nothing wrong"
    bench.worker.handle(Cancel(bench.calls[1]))
    bench.worker.handle(Cancel(bench.calls[2]))
    bench.sender.drain("b")
    bench.sender.drain("c")
    bench.receiver.fence(bench.heard[2][0].pull.handoff_id)
    bench.deliver()
    bench.clock.advance(60.0)
    bench.submit(other, "d", source=ALL, deadline=1000.0)
    assert bench.kinds(3) == ["pull"]
    bench.receiver.commit(bench.heard[3][0].pull.handoff_id, names(other)[2])
    bench.deliver()
    finish(bench, "d")
    bench.assert_whole()


def test_a_pull_never_takes_more_than_half_of_the_time_that_is_left() -> None:
    bench = PrefillBench()
    bench.submit(PROMPT, "a", source=ALL, deadline=1.0)
    bench.clock.advance(0.6)
    bench.worker.tick(bench.clock.now())
    bench.deliver()
    bench.receiver.fence(bench.heard[0][0].pull.handoff_id)
    bench.deliver()
    assert finish(bench).pulled_tokens == 0
    bench.assert_whole()


def test_blocks_of_another_text_are_not_used_however_well_they_verify() -> None:
    bench = PrefillBench()
    ticket = pulling(bench)
    bench.receiver.commit(ticket.handoff_id, names(PROMPT, b"another tenant")[2])
    bench.deliver()
    assert finish(bench).pulled_tokens == 0
    assert computed(bench) == 30
    bench.assert_whole()


@pytest.mark.parametrize("won", [False, True])
def test_a_cancel_in_mid_pull_gives_it_up_and_verified_blocks_are_kept(won: bool) -> None:
    bench = PrefillBench()
    ticket = pulling(bench)
    if won:
        bench.receiver.commit(ticket.handoff_id, names(PROMPT)[2])
    bench.worker.handle(Cancel(bench.calls[0]))
    bench.deliver()
    bench.sender.drain("a")
    if not won:
        bench.receiver.fence(ticket.handoff_id)
    bench.deliver()
    assert bench.kinds() == ["pull"]
    assert bench.toy.blocks.match_prefix(names(PROMPT), PROMPT) == (3 if won else 0)
    bench.assert_whole()


def test_the_deadline_ends_a_request_that_waits_for_its_pull() -> None:
    bench = PrefillBench()
    ticket = pulling(bench)
    bench.clock.advance(11.0)
    bench.worker.tick(bench.clock.now())
    bench.deliver()
    assert bench.kinds() == ["pull", "error"]
    assert bench.error() == ErrorCode.DEADLINE_EXCEEDED
    bench.sender.drain("a")
    bench.receiver.fence(ticket.handoff_id)
    bench.deliver()
    bench.assert_whole()


def test_without_room_for_everybody_who_waits_nothing_is_pulled() -> None:
    bench = PrefillBench(num_blocks=6)
    bench.submit(PROMPT[::-1], "first")
    bench.submit(PROMPT, "a", source=ALL)
    assert bench.kinds(1) == []
    finish(bench, "first", 0)
    assert finish(bench).pulled_tokens == 0
    bench.assert_whole()


def test_a_receiver_that_is_full_is_no_failure_of_the_request() -> None:
    bench = PrefillBench()
    bench.receiver.refuse_next = KvferryError(ErrorCode.OVERLOADED, "scripted")
    bench.submit(PROMPT, "a", source=ALL)
    assert finish(bench).pulled_tokens == 0
    assert bench.kinds() == ["first_token", "done"]
    bench.assert_whole()


def test_others_are_computed_while_one_waits_for_its_pull() -> None:
    bench = PrefillBench()
    ticket = pulling(bench)
    bench.submit(PROMPT[::-1], "b")
    finish(bench, "b")
    assert bench.kinds(0) == ["pull"]
    bench.receiver.commit(ticket.handoff_id, names(PROMPT)[2])
    bench.deliver()
    assert finish(bench, "a", 0).pulled_tokens == 24
    bench.assert_whole()


def test_a_pull_overtaken_by_another_request_that_computes_the_same_is_harmless() -> None:
    bench = PrefillBench()
    ticket = pulling(bench)
    bench.submit(PROMPT, "b")
    finish(bench, "b")
    bench.receiver.commit(ticket.handoff_id, names(PROMPT)[2])
    bench.deliver()
    done = finish(bench, "a", 0)
    assert done.cached_tokens == 24
    assert done.pulled_tokens == 24
    bench.assert_whole()


def test_the_same_ticket_can_come_again_before_its_first_pull_is_fenced() -> None:
    bench = PrefillBench()
    first = pulling(bench)
    bench.worker.handle(Cancel(bench.calls[0]))
    bench.sender.drain("a")
    bench.deliver()
    second = pulling(bench)
    assert not set(first.block_ids) & set(second.block_ids)
    bench.receiver.commit(second.handoff_id, names(PROMPT)[2])
    bench.receiver.fence(first.handoff_id)
    bench.deliver()
    assert finish(bench).pulled_tokens == 24
    bench.assert_whole()


def test_the_scripted_receiver_notices_when_somebody_else_writes_into_blocks_being_pulled() -> None:
    """The tests above rest on it."""
    bench = PrefillBench()
    ticket = pulling(bench)
    receiver: ScriptedReceiver = bench.receiver
    bench.toy.cache.k(0)[ticket.block_ids[0]] = 1.0
    with pytest.raises(AssertionError, match="touched"):
        receiver.check()
