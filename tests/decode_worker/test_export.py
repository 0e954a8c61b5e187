"""What a decode worker sends back from its prefix cache, and what it does not."""

from typing import Any

import pytest

from decode_worker.export import MAX_EXPORTS, ExportRequest, check_export
from decode_worker.worker import SessionClosed
from kv_cache.block_hash import BlockHasher
from kvferry_rpc.internal_pb2 import Export, Ticket
from runtime.errors import ErrorCode, KvferryError
from tests.support.decode_bench import MODEL, PROMPT, DecodeBench
from tests.support.toy_engine import sequence

LAYOUT = MODEL.layout(8)


def ticket(name: str = "x", first: int = 0, blocks: int = 3, **layout: Any) -> Ticket:
    fields = {"block_size": 8, "dtype": "fp32", **layout}
    message = LAYOUT.to_proto()
    for key, value in fields.items():
        setattr(message, key, value)
    return Ticket(handoff_id=name, attempt=1, first_block=first, block_ids=range(20, 20 + blocks), layout=message)


def wants(name: str = "x", first: int = 0, blocks: int = 3, salt: bytes = b"", **layout: Any) -> ExportRequest:
    tokens = tuple((PROMPT + PROMPT)[: (first + blocks) * 8])
    return ExportRequest(tokens, salt, ticket(name, first, blocks, **layout), deadline=5.0)


@pytest.fixture
def bench() -> DecodeBench:
    """A worker that has computed PROMPT and three tokens, and holds nothing but its cache."""
    bench = DecodeBench()
    bench.admit(local=True)
    bench.run()
    return bench


def test_cached_blocks_are_pushed_whole_committed_under_their_name_and_pinned_until_drained(
    bench: DecodeBench,
) -> None:
    bench.worker.handle(wants(first=1, blocks=2))
    outgoing = bench.sender.open_handoffs["x"]
    assert outgoing.committed
    assert len(outgoing.pushed) == 2, "the first block is there already"
    record = bench.sender.records["x"]
    assert record.num_tokens == 24
    assert record.first_token == BlockHasher.for_layout(LAYOUT).hash_blocks(PROMPT)[2]
    usage = bench.toy.engine.usage()
    assert usage.available == usage.total - 3
    bench.worker.tick(1.0)  # no audit while something is read
    bench.sender.sent("x")
    bench.deliver()
    assert bench.toy.engine.usage().available == usage.total
    bench.assert_whole()


def test_pinned_blocks_are_not_overwritten_by_a_request_that_needs_room(bench: DecodeBench) -> None:
    bench.worker.handle(wants())
    bench.worker.handle(wants("y"))
    bench.admit("big", local=True, max_tokens=20)
    seq = sequence("other", range(31, 61))
    bench.toy.engine.add(seq)
    for _ in range(40):
        if bench.worker.has_work:
            bench.toy.step()
        bench.sender.check()
    bench.toy.engine.cancel("other")
    bench.cancel("big")
    bench.sender.sent("x")
    bench.sender.sent("y")
    bench.deliver()
    bench.assert_whole()


@pytest.mark.parametrize(
    "request_",
    [
        wants(salt=b"another tenant"),
        wants(blocks=4),  # one block more than was ever full
        wants(block_size=16, blocks=1),
        wants(dtype="int8"),
    ],
    ids=["salt", "too long", "block size", "dtype"],
)
def test_what_is_not_all_here_is_given_up_at_once_and_nothing_is_held(
    bench: DecodeBench, request_: ExportRequest
) -> None:
    bench.worker.handle(request_)
    outgoing = bench.sender.open_handoffs["x"]
    assert outgoing.over
    assert not outgoing.pushed
    assert bench.toy.engine.is_idle
    bench.sender.drain("x")
    bench.deliver()
    bench.assert_whole()


def test_blocks_evicted_meanwhile_are_not_sent(bench: DecodeBench) -> None:
    hungry = sequence("hungry", range(31, 61), max_tokens=30)
    bench.toy.engine.add(hungry)
    bench.toy.run_until_idle()
    bench.worker.handle(wants())
    assert bench.sender.open_handoffs["x"].over
    bench.sender.drain("x")
    bench.deliver()
    bench.assert_whole()


def test_an_export_that_fails_holds_its_blocks_until_nobody_reads_them(bench: DecodeBench) -> None:
    bench.worker.handle(wants())
    bench.sender.fail("x", KvferryError(ErrorCode.HANDOFF_FAILED, "the link broke"))
    bench.deliver()
    assert not bench.toy.engine.is_idle
    bench.sender.drain("x")
    bench.deliver()
    bench.assert_whole()


def test_exports_are_bounded_and_a_place_comes_back(bench: DecodeBench) -> None:
    for index in range(MAX_EXPORTS + 1):
        bench.worker.handle(wants(f"x{index}"))
    over = [name for name, outgoing in bench.sender.open_handoffs.items() if outgoing.over]
    assert over == [f"x{MAX_EXPORTS}"]
    bench.sender.sent("x0")
    bench.deliver()
    bench.worker.handle(wants("again"))
    assert bench.sender.open_handoffs["again"].committed
    for name in list(bench.sender.open_handoffs):
        (bench.sender.drain if name in over else bench.sender.sent)(name)
    bench.deliver()
    bench.assert_whole()


@pytest.mark.parametrize("refusal", [ValueError("no"), KvferryError(ErrorCode.UNAVAILABLE, "closing")])
def test_a_ticket_that_the_sender_refuses_holds_nothing(bench: DecodeBench, refusal: Exception) -> None:
    bench.sender.refuse_next = refusal
    bench.worker.handle(wants())
    bench.assert_whole()


@pytest.mark.parametrize("sent", [False, True])
def test_the_same_ticket_twice_is_served_once(bench: DecodeBench, sent: bool) -> None:
    bench.worker.handle(wants())
    if sent:
        bench.sender.sent("x")  # and the worker has not heard of it yet
    bench.worker.handle(wants())
    assert ("x" in bench.sender.open_handoffs) is not sent
    if not sent:
        bench.sender.sent("x")
    bench.deliver()
    bench.assert_whole()


def test_the_end_of_a_session_leaves_its_exports_alone(bench: DecodeBench) -> None:
    bench.worker.handle(wants())
    bench.worker.handle(SessionClosed(1))
    assert not bench.sender.open_handoffs["x"].over
    bench.sender.sent("x")
    bench.deliver()
    bench.assert_whole()


def export(**changes: Any) -> Export:
    fields: dict[str, Any] = {"prompt_token_ids": PROMPT[:24], "ticket": ticket(), "deadline_ms": 500}
    return Export(request_id="r", attempt=1, **{**fields, **changes})


def test_an_export_from_the_wire_keeps_its_fields_and_gets_a_deadline() -> None:
    request = check_export(export(cache_salt=b"s"), 10.0)
    assert request == ExportRequest(tuple(PROMPT[:24]), b"s", ticket(), 10.5, "r")


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt_token_ids": PROMPT[:23]},
        {"prompt_token_ids": PROMPT[:25]},
        {"prompt_token_ids": [], "ticket": ticket(blocks=0)},
        {"ticket": ticket(block_size=0)},
        {"ticket": ticket(name="")},
        {"ticket": ticket(name="x" * 513)},
        {"cache_salt": b"s" * 65},
        {"ticket": Ticket(handoff_id="x")},
    ],
)
def test_an_export_that_makes_no_sense_is_refused_at_the_door(changes: dict[str, Any]) -> None:
    with pytest.raises(KvferryError) as caught:
        check_export(export(**changes), 10.0)
    assert caught.value.code == ErrorCode.INVALID_REQUEST
