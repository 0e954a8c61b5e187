"""The receipt: put together from two halves, checked, kept for a while."""

from dataclasses import replace

import pytest

from kvferry_rpc.common_pb2 import KVReceipt, Migration
from kvferry_rpc.internal_pb2 import DecodeDone, HandoffVerified, PrefillDone
from router.dispatch.receipts import (
    MAX_FAILURE_LINES,
    AttemptRecord,
    Move,
    ReceiptStore,
    cached_tokens,
    merge,
    unplaced,
    workers,
)
from router.policy import Plan

REMOTE = Plan("decode-0", "prefill-0", "because")
LOCAL = Plan("decode-0", None, "nobody else")


def prefill_done(**changes: object) -> PrefillDone:
    values = {
        "cached_tokens": 16,
        "blocks_sent": 3,
        "bytes_sent": 12288,
        "transport": "shm",
        "checksum": b"digest",
        "wait_ms": 4.0,
        "prefill_ms": 20.0,
        "transfer_ms": 8.0,
        "exposed_transfer_ms": 2.0,
        "transport_detail": "rc_mlx5",
        "expected_transport": "nixl",
        "conversion": "dtype fp32 -> int8",
        "pulled_tokens": 12,
        "pull_ms": 3.0,
    }
    return PrefillDone(**{**values, **changes})  # type: ignore[arg-type]


def decode_done(**changes: object) -> DecodeDone:
    values = {
        "cached_tokens": 32,
        "tokens_recomputed": 0,
        "preempted_tokens": 5,
        "checksum_verified": True,
        "checksum": b"digest",
        "commit_ms": 1.0,
        "decode_ms": 90.0,
    }
    return DecodeDone(**{**values, **changes})  # type: ignore[arg-type]


def record(
    plan: Plan = REMOTE,
    prefill: PrefillDone | None = None,
    decode: DecodeDone | None = None,
    computed_before: bool = False,
) -> AttemptRecord:
    return AttemptRecord(2, plan, "handoff", prefill, decode, 10.0, 35.0, computed_before=computed_before)


def moved() -> Move:
    plan = Plan("decode-1", "decode-0", "moved")
    done = decode_done(tokens_recomputed=1)
    there = record(plan, prefill_done(checksum=b"other"), done)
    verified = HandoffVerified(checksum_verified=True, checksum=b"other", transport="shm")
    return Move(replace(there, verified=verified), output_tokens=7, pause_ms=2.5)


def test_each_side_fills_its_part_and_queue_time_runs_from_the_router_to_the_start_of_compute() -> None:
    receipt = merge("r", 40, record(REMOTE, prefill_done(), decode_done()), ["attempt 1: lost"])
    assert receipt == KVReceipt(
        request_id="r",
        handoff_id="handoff",
        attempt=2,
        prefill_worker="prefill-0",
        decode_worker="decode-0",
        transport="shm",
        prompt_tokens=40,
        prefill_cached_tokens=16,
        decode_cached_tokens=32,
        preempted_tokens=5,
        blocks_sent=3,
        bytes_sent=12288,
        checksum_verified=True,
        checksum=b"digest",
        queue_ms=14.0,
        prefill_ms=20.0,
        transfer_ms=8.0,
        exposed_transfer_ms=2.0,
        commit_ms=1.0,
        decode_ms=90.0,
        plan_reason="because",
        earlier_failures=["attempt 1: lost"],
        transport_detail="rc_mlx5",
        expected_transport="nixl",
        conversion="dtype fp32 -> int8",
        pulled_tokens=12,
        pull_ms=3.0,
        hidden_share=0.75,
    )


@pytest.mark.parametrize(
    ("transfer_ms", "exposed_ms", "share"), [(8.0, 0.0, 1.0), (8.0, 8.0, 0.0), (8.0, 9.0, 0.0), (0.0, 0.0, 0.0)]
)
def test_the_share_of_a_transfer_that_was_hidden_is_between_none_and_all(
    transfer_ms: float, exposed_ms: float, share: float
) -> None:
    done = prefill_done(transfer_ms=transfer_ms, exposed_transfer_ms=exposed_ms)
    assert merge("r", 40, record(REMOTE, done, decode_done()), []).hidden_share == share


def test_every_field_of_a_receipt_is_filled_when_everything_happened() -> None:
    whole = record(REMOTE, prefill_done(), decode_done(tokens_recomputed=1))
    receipt = merge("r", 40, replace(whole, moves=(moved(),)), ["x"])
    filled = {field.name for field, _ in receipt.ListFields()}
    assert filled == {field.name for field in KVReceipt.DESCRIPTOR.fields}
    filled = {field.name for field, _ in receipt.migrations[0].ListFields()}
    assert filled == {field.name for field in Migration.DESCRIPTOR.fields}


def test_a_move_tells_of_itself_and_leaves_the_first_hand_off_as_it_was() -> None:
    plain = merge("r", 40, record(REMOTE, prefill_done(), decode_done()), [])
    receipt = merge("r", 40, replace(record(REMOTE, prefill_done(), decode_done()), moves=(moved(),)), [])
    assert receipt.decode_worker == "decode-1"
    (migration,) = receipt.migrations
    assert (migration.from_worker, migration.to_worker, migration.output_tokens) == ("decode-0", "decode-1", 7)
    assert migration.pause_ms == 2.5
    del receipt.migrations[:]
    receipt.decode_worker = plain.decode_worker
    assert receipt == plain
    assert workers(replace(record(REMOTE, prefill_done()), moves=(moved(),))) == {"prefill-0", "decode-0", "decode-1"}


def test_local_prefill_moves_nothing_and_names_one_worker_twice() -> None:
    done = decode_done(checksum=b"", checksum_verified=False)
    receipt = merge("r", 40, record(LOCAL, None, done), [])
    assert (receipt.transport, receipt.handoff_id) == ("local", "")
    assert receipt.prefill_worker == receipt.decode_worker == "decode-0"
    assert receipt.prefill_ms == 25.0
    assert receipt.bytes_sent == 0


def test_a_missing_half_leaves_its_fields_empty() -> None:
    receipt = merge("r", 40, record(REMOTE, None, decode_done()), [])
    assert (receipt.transport, receipt.checksum, receipt.queue_ms) == ("", b"digest", 10.0)
    receipt = merge("r", 40, record(REMOTE, prefill_done(), None), [])
    assert (receipt.transport, receipt.checksum_verified, receipt.decode_ms) == ("shm", False, 0.0)


VERIFIED = HandoffVerified(cached_tokens=32, checksum_verified=True, checksum=b"digest", commit_ms=1.5, transport="shm")


def test_what_the_decode_worker_verified_stands_when_the_rest_of_its_half_did_not_come() -> None:
    cut = replace(record(REMOTE, prefill_done(), None), verified=VERIFIED, verified_ms=40.0, ended_ms=100.0)
    receipt = merge("r", 40, cut, [])
    assert (receipt.checksum_verified, receipt.checksum, receipt.commit_ms) == (True, b"digest", 1.5)
    assert (receipt.decode_cached_tokens, receipt.decode_ms) == (32, 60.0)
    assert merge("r", 40, replace(cut, decode_done=decode_done()), []).decode_ms == 90.0


def test_the_transport_and_the_digest_are_known_from_the_decode_worker_when_the_prefill_half_is_missing() -> None:
    receipt = merge("r", 40, replace(record(REMOTE, None, None), verified=VERIFIED), [])
    assert (receipt.transport, receipt.checksum, receipt.expected_transport) == ("shm", b"digest", "")


def test_a_local_answer_that_was_cut_counts_from_its_first_token() -> None:
    receipt = merge("r", 40, replace(record(LOCAL, None, None), ended_ms=100.0), [])
    assert (receipt.prefill_ms, receipt.decode_ms, receipt.checksum_verified) == (25.0, 65.0, False)


def test_a_request_that_was_never_placed_has_a_receipt_of_its_failure() -> None:
    assert unplaced("r", 40, 12.0, ["final: x"]) == KVReceipt(
        request_id="r", prompt_tokens=40, queue_ms=12.0, earlier_failures=["final: x"]
    )


def test_cached_tokens_never_exceed_the_prompt() -> None:
    # H024: on a later attempt a cache may hold the output so far too.
    done = record(REMOTE, prefill_done(cached_tokens=64), decode_done(cached_tokens=80))
    receipt = merge("r", 40, done, [])
    assert (receipt.prefill_cached_tokens, receipt.decode_cached_tokens) == (40, 40)
    assert cached_tokens(done, 40) == 40


def test_what_an_earlier_attempt_computed_is_no_cache_hit() -> None:
    assert cached_tokens(record(REMOTE, prefill_done(), decode_done()), 40) == 16
    assert cached_tokens(record(REMOTE, prefill_done(), decode_done(), computed_before=True), 40) == 0
    assert cached_tokens(record(REMOTE, None, decode_done()), 40) == 0
    assert cached_tokens(record(LOCAL, None, decode_done()), 40) == 32


def test_the_failure_lines_of_a_receipt_are_bounded() -> None:
    receipt = merge("r", 40, record(), [f"line {number}" for number in range(1000)])
    assert len(receipt.earlier_failures) == MAX_FAILURE_LINES
    assert (receipt.earlier_failures[0], receipt.earlier_failures[-1]) == ("line 0", "line 999")


def test_the_store_keeps_the_last_receipts() -> None:
    store = ReceiptStore(3)
    for number in range(5):
        store.put(KVReceipt(request_id=str(number)))
    store.put(KVReceipt(request_id="3", attempt=7))
    store.put(KVReceipt(request_id="5"))
    assert [name for name in map(str, range(6)) if store.get(name)] == ["3", "4", "5"]
    kept = store.get("3")
    assert kept is not None
    assert kept.attempt == 7
