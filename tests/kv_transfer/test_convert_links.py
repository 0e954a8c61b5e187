"""Hand-offs between pools of different layouts, end to end: what arrives, what is written, what is refused."""

import threading
from dataclasses import replace
from typing import Any

import pytest

from kv_cache.layout import KVCacheLayout, KVDtype
from kv_transfer.events import Committed, Failed, Sent
from kv_transfer.faults import FaultPlan
from kvferry_rpc.common_pb2 import ErrorCode
from runtime.errors import KvferryError
from tests.support.kv_convert_pair import ConvertPair
from tests.support.kv_pair import KINDS, WAIT_S

LAYOUT = KVCacheLayout("tiny", "abc", num_layers=3, num_kv_heads=4, head_dim=16, block_size=16, dtype=KVDtype.FP32)
INT8 = replace(LAYOUT, dtype=KVDtype.INT8)
TARGETS: dict[str, dict[str, Any]] = {
    "larger blocks": {"block_size": 64},
    "smaller blocks": {"block_size": 8},
    "int8": {"dtype": KVDtype.INT8},
    "fp8, larger blocks": {"dtype": KVDtype.FP8_E4M3, "block_size": 32},
    "bf16, half of the heads": {"dtype": KVDtype.BF16, "num_kv_heads": 2, "kv_head_start": 2, "total_kv_heads": 4},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("change", TARGETS)
def test_what_arrives_is_the_prompt_in_the_receivers_layout(kind: str, change: str) -> None:
    target = replace(LAYOUT, **TARGETS[change])
    with ConvertPair(LAYOUT, target, num_tokens=150, kind=kind) as pair:
        ticket = pair.reserve()
        pair.send(ticket, cuts=[1, 4, 5])
        received, sent = pair.outcome(ticket)
        assert isinstance(received, Committed)
        assert isinstance(sent, Sent)
        assert pair.arrived(ticket) == pair.expected()
        assert received.stats.digest == sent.stats.digest
        assert sent.stats.size_bytes == target.pool_bytes(pair.num_blocks)
        assert sent.stats.conversion != ""


def test_equal_layouts_need_no_conversion_and_no_staging() -> None:
    with ConvertPair(LAYOUT, LAYOUT, num_tokens=150) as pair:
        ticket = pair.reserve()
        pair.send(ticket)
        _, sent = pair.outcome(ticket)
        assert sent.stats.conversion == ""
        assert pair.sender._pusher._staging == {}
        size = LAYOUT.block_bytes
        at = [pair.prefill.pool.buffer[block * size : (block + 1) * size] for block in pair.local]
        assert pair.arrived(ticket) == b"".join(at)


@pytest.mark.parametrize("kind", ["memory", "tcp"])
@pytest.mark.parametrize("wire", [KVDtype.INT8, KVDtype.FP8_E4M3, KVDtype.BF16])
@pytest.mark.parametrize("block_size", [16, 64])
def test_a_wire_dtype_saves_bytes_and_the_pool_keeps_its_own(kind: str, wire: KVDtype, block_size: int) -> None:
    target = replace(LAYOUT, block_size=block_size)
    with ConvertPair(LAYOUT, target, num_tokens=150, kind=kind, wire_dtype=wire) as pair:
        ticket = pair.reserve()
        pair.send(ticket, cuts=[3])
        received, sent = pair.outcome(ticket)
        assert isinstance(received, Committed)
        assert pair.arrived(ticket) == pair.expected()
        assert sent.stats.size_bytes == replace(target, dtype=wire).pool_bytes(pair.num_blocks)
        assert f"dtype fp32 -> {wire.value} on the wire" in sent.stats.conversion


@pytest.mark.parametrize("kind", ["memory-direct", "shm"])
def test_a_wire_dtype_is_not_for_one_sided_transports_and_the_log_says_so(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    with ConvertPair(LAYOUT, LAYOUT, num_tokens=150, kind=kind, wire_dtype=KVDtype.INT8) as pair:
        ticket = pair.reserve()
        pair.send(ticket)
        _, sent = pair.outcome(ticket)
        assert sent.stats.conversion == ""
        assert sent.stats.size_bytes == LAYOUT.pool_bytes(pair.num_blocks)
        assert pair.arrived(ticket)[: LAYOUT.block_bytes] == pair.expected()[: LAYOUT.block_bytes]
        assert "in fp32, not in int8: it is one-sided" in caplog.text


@pytest.mark.parametrize("first_block", [1, 2, 3])
@pytest.mark.parametrize("block_size", [8, 64])
def test_only_the_blocks_that_the_ticket_asks_for_are_written(first_block: int, block_size: int) -> None:
    target = replace(INT8, block_size=block_size)
    with ConvertPair(LAYOUT, target, num_tokens=200) as pair:
        ticket = pair.reserve(first_block=first_block)
        pair.send(ticket, cuts=[2, 3, 7])
        received, sent = pair.outcome(ticket)
        assert isinstance(received, Committed)
        assert pair.arrived(ticket) == pair.expected()[first_block * target.block_bytes :]
        assert sent.stats.size_bytes == (pair.num_blocks - first_block) * target.block_bytes


@pytest.mark.parametrize("kind", ["memory", "shm"])
@pytest.mark.parametrize(
    "faults", [FaultPlan(swap_blocks=(0, 1)), FaultPlan(skip_block=1), FaultPlan(corrupt_at_post=1)], ids=str
)
@pytest.mark.parametrize("wire", [None, KVDtype.INT8])
def test_faults_in_converted_payload_are_noticed(kind: str, faults: FaultPlan, wire: KVDtype | None) -> None:
    target = replace(LAYOUT, block_size=32)
    with ConvertPair(LAYOUT, target, num_tokens=150, kind=kind, wire_dtype=wire, faults=faults) as pair:
        ticket = pair.reserve()
        pair.open(ticket)
        pair.push(ticket, range(len(pair.local)), range(3))
        pair.commit(ticket)
        received, sent = pair.outcome(ticket)
        assert isinstance(received, Failed)
        assert isinstance(sent, Failed)
        wrong = "the sender wrote" if faults.skip_block is not None else "does not hold what was sent"
        assert wrong in received.error.message


def test_a_ticket_for_a_pool_that_cannot_be_filled_is_refused_before_dialling() -> None:
    half = replace(LAYOUT, num_kv_heads=2, total_kv_heads=4)
    with ConvertPair(half, LAYOUT, num_tokens=40) as pair:
        ticket = pair.reserve()
        with pytest.raises(KvferryError, match="one hand-off has one sender") as raised:
            pair.open(ticket)
        assert raised.value.code == ErrorCode.HANDOFF_FAILED
        assert str(half) in str(raised.value)
        assert str(LAYOUT) in str(raised.value)
        assert pair.sender.snapshot().transports == {}
        pair.receiver.abort(ticket.handoff_id, "no use")


def test_a_ticket_whose_layout_is_not_that_of_the_pool_fails() -> None:
    with ConvertPair(LAYOUT, LAYOUT, num_tokens=40) as pair:
        ticket = pair.reserve()
        ticket.layout.CopyFrom(replace(LAYOUT, block_size=8).to_proto())
        del ticket.block_ids[:]
        ticket.block_ids.extend(range(5))
        pair.open(ticket)
        failed = pair.sent.wait(ticket.handoff_id, Failed)
        assert "the ticket is not for the decode worker's pool" in failed.error.message
        pair.receiver.abort(ticket.handoff_id, "no use")


def test_a_push_counts_in_the_senders_blocks() -> None:
    with ConvertPair(LAYOUT, replace(LAYOUT, block_size=64), num_tokens=150) as pair:
        ticket = pair.reserve()
        pair.open(ticket)
        with pytest.raises(ValueError, match="not a run of the prompt's 10 blocks"):
            pair.sender.push(ticket.handoff_id, 0, [0] * 11, range(3))
        pair.sender.abort(ticket.handoff_id, "enough")
        pair.outcome(ticket)


def test_a_link_with_too_much_to_write_says_when_it_has_room_again() -> None:
    room = threading.Event()
    seen: list[int] = []

    def ask(pair: ConvertPair) -> None:
        asker = threading.Thread(target=lambda: seen.append(pair.sender.backlog_bytes("unknown")))
        asker.start()
        asker.join(WAIT_S)  # Another thread gets an answer: no lock is held.
        room.set()

    with ConvertPair(LAYOUT, INT8, num_tokens=150, max_backlog_bytes=1, on_backlog=lambda: ask(pair)) as pair:
        ticket = pair.reserve()
        pair.send(ticket)
        pair.outcome(ticket)
        assert room.wait(WAIT_S)
        assert seen[0] == 0
        assert pair.sender.backlog_bytes(ticket.handoff_id) == 0
        assert pair.sender.may_push(ticket.handoff_id)
