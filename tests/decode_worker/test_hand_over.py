"""Giving a running answer to another decode worker: it stands still, leaves with its KV, or goes on."""

import pytest

from decode_worker.hand_over import HandOverRequest, PauseRequest, ResumeRequest
from decode_worker.worker import SessionClosed, sequence_id
from engine.sequence import SamplingParams
from kvferry_rpc.common_pb2 import TokenOutput
from kvferry_rpc.internal_pb2 import DecodeEvent, Ticket
from runtime.errors import ErrorCode, KvferryError
from tests.support.decode_bench import MODEL, PROMPT, DecodeBench
from tests.support.scripted_handoffs import DIGEST
from tests.support.toy_engine import sequence

SEQ = sequence_id(1, "r", 1)
TOKENS = 12


def running(num_tokens: int, num_logprobs: int | None = None) -> DecodeBench:
    """A worker that has given the only answer so many tokens."""
    bench = DecodeBench()
    params = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True, num_logprobs=num_logprobs)
    bench.admit(local=True, sampling=params)
    while len(tokens(bench)) < num_tokens:
        bench.worker.step()
    return bench


def tokens(bench: DecodeBench) -> list[TokenOutput]:
    return [token for event in bench.heard[1] for token in event.tokens.tokens]


def ticket(bench: DecodeBench, first: int = 0, name: str = "move") -> Ticket:
    """As another worker would make it for all tokens but the last."""
    num_blocks = -(-(len(PROMPT) + len(tokens(bench)) - 1) // 8)
    layout = MODEL.layout(8).to_proto()
    blocks = range(20, 20 + num_blocks - first)
    return Ticket(handoff_id=name, attempt=2, first_block=first, block_ids=blocks, layout=layout)


def answer(bench: DecodeBench) -> DecodeEvent:
    return bench.heard[1][-1]


@pytest.mark.parametrize("count", range(1, TOKENS))
@pytest.mark.parametrize("first", [0, 2])
def test_a_paused_answer_leaves_with_all_its_kv_and_its_last_token(count: int, first: int) -> None:
    bench = running(count)
    bench.worker.handle(PauseRequest(SEQ))
    assert bench.kinds()[-1] == "paused"
    assert not bench.worker.step(), "it stands still"
    bench.worker.handle(HandOverRequest(SEQ, ticket(bench, first)))
    outgoing, record = bench.sender.open_handoffs["move"], bench.sender.records["move"]
    assert outgoing.committed
    assert len(outgoing.pushed) == len(outgoing.ticket.block_ids)
    assert record.num_tokens == len(PROMPT) + count - 1
    assert TokenOutput.FromString(record.first_token) == tokens(bench)[-1]
    bench.worker.tick(0.0)  # no audit while its blocks are read
    bench.sender.sent("move")
    bench.deliver()
    assert bench.kinds()[-1] == "handed_over"
    half = answer(bench).handed_over
    assert (half.transport, half.checksum, half.blocks_sent) == ("test", DIGEST, 1)
    assert len(tokens(bench)) == count
    bench.assert_whole()


def test_its_last_token_keeps_its_log_probabilities() -> None:
    bench = running(3, num_logprobs=2)
    bench.worker.handle(PauseRequest(SEQ))
    bench.worker.handle(HandOverRequest(SEQ, ticket(bench)))
    last = TokenOutput.FromString(bench.sender.records["move"].first_token)
    assert last == tokens(bench)[-1]
    assert len(last.top_logprobs) == 2
    bench.sender.sent("move")
    bench.deliver()
    bench.assert_whole()


def test_blocks_that_leave_are_not_overwritten_while_they_are_read() -> None:
    bench = running(3)
    bench.worker.handle(PauseRequest(SEQ))
    bench.worker.handle(HandOverRequest(SEQ, ticket(bench)))
    bench.toy.engine.add(sequence("other", range(31, 50)))
    for _ in range(8):
        if bench.worker.has_work:
            bench.toy.step()
        bench.sender.check()
    bench.toy.engine.cancel("other")
    bench.sender.sent("move")
    bench.deliver()
    bench.assert_whole()


def test_others_go_on_while_one_stands_still() -> None:
    bench = running(2)
    bench.admit("s", 2, local=True, max_tokens=2)
    bench.worker.handle(PauseRequest(SEQ))
    while bench.worker.step():
        pass
    assert bench.kinds(2)[-1] == "done"
    assert len(tokens(bench)) == 2
    bench.worker.handle(ResumeRequest(SEQ))
    bench.run()
    assert bench.kinds()[-1] == "done"
    bench.assert_whole()


def test_an_answer_that_is_resumed_is_the_same() -> None:
    undisturbed = running(TOKENS)
    bench = running(4)
    bench.worker.handle(PauseRequest(SEQ))
    bench.worker.handle(ResumeRequest(SEQ))
    bench.worker.handle(ResumeRequest(SEQ))
    bench.run()
    assert tokens(bench) == tokens(undisturbed)
    bench.assert_whole()


def test_what_has_no_token_yet_is_not_paused_and_what_has_ended_hears_nothing() -> None:
    bench = DecodeBench()
    bench.admit()
    bench.worker.handle(PauseRequest(SEQ))
    assert bench.kinds() == ["ticket", "resumed"]
    bench.cancel()
    bench.receiver.fence(next(iter(bench.receiver.failed)))
    bench.deliver()
    bench.worker.handle(PauseRequest(SEQ))
    assert bench.kinds() == ["ticket", "resumed"]
    bench.assert_whole()


@pytest.mark.parametrize("why", ["not paused", "preempted", "refused"])
def test_a_hand_over_that_cannot_be_leaves_the_answer_here(why: str) -> None:
    bench = running(3)
    if why != "not paused":
        bench.worker.handle(PauseRequest(SEQ))
    wanted = ticket(bench)
    if why == "preempted":
        bench.toy.engine._scheduler._preempt_youngest()
    elif why == "refused":
        bench.sender.refuse_next = ValueError("it is for another prompt")
    bench.worker.handle(HandOverRequest(SEQ, wanted))
    assert bench.kinds()[-1] == "resumed"
    assert answer(bench).resumed.code == ErrorCode.HANDOFF_FAILED
    assert not bench.sender.open_handoffs
    bench.run()
    assert bench.kinds()[-1] == "done"
    assert len(tokens(bench)) == TOKENS
    bench.assert_whole()


def test_a_hand_over_that_fails_on_its_way_is_told_and_its_blocks_wait_for_their_last_reader() -> None:
    bench = running(3)
    bench.worker.handle(PauseRequest(SEQ))
    bench.worker.handle(HandOverRequest(SEQ, ticket(bench)))
    bench.sender.fail("move", KvferryError(ErrorCode.HANDOFF_FAILED, "the link broke"))
    bench.deliver()
    assert bench.kinds()[-1] == "failed"
    assert not bench.toy.engine.is_idle
    bench.worker.handle(ResumeRequest(SEQ))
    assert not bench.worker.has_work, "it has left"
    bench.sender.drain("move")
    bench.deliver()
    bench.assert_whole()


@pytest.mark.parametrize("when", ["paused", "leaving"])
@pytest.mark.parametrize("how", ["cancel", "session", "deadline"])
def test_a_reader_that_leaves_meanwhile_leaves_nothing_behind(when: str, how: str) -> None:
    bench = running(3)
    bench.worker.handle(PauseRequest(SEQ))
    if when == "leaving":
        bench.worker.handle(HandOverRequest(SEQ, ticket(bench)))
    if how == "cancel":
        bench.cancel()
    elif how == "session":
        bench.worker.handle(SessionClosed(1))
    else:
        bench.clock.advance(60.0)
        bench.worker.tick(bench.clock.now())
    if when == "leaving":
        bench.sender.fail("move", KvferryError(ErrorCode.CANCELLED, "the taker gave it up"))
        bench.sender.drain("move")
    bench.deliver()
    assert not bench.worker.has_work
    bench.assert_whole()
    # Nothing of it is remembered: a namesake runs.
    bench.admit(local=True)
    bench.run()
    assert bench.kinds()[-1] == "done"
    bench.assert_whole()
