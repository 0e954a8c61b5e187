"""The KV receipt: two workers' halves and the router's times, put together and kept for a while."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvferry_rpc.common_pb2 import KVReceipt, Migration
from kvferry_rpc.internal_pb2 import DecodeDone, HandoffVerified, PrefillDone
from router.policy import Plan

LOCAL_TRANSPORT = "local"
MAX_FAILURE_LINES = 16
PROOFS = ("proved", "recomputed", "local", "unproved")
"""What a receipt can show; see `proof_of`."""
FINAL_FAILURE = "final: "
"""How the last of `earlier_failures` begins when the request failed."""


@dataclass(frozen=True, slots=True)
class AttemptRecord:
    """All that is known of an attempt. A half that has not arrived is None; `verified` is the part of the decode half
    that comes before the first token.

    `placed_ms` (prefill was asked for), `first_token_ms`, `verified_ms` and `ended_ms` are durations since the request
    came to the router; None = did not happen. `computed_before`: an earlier attempt got past its admission. `moves`
    follow the hand-off that all the rest is about; the decode half is then of the worker that ended the answer.
    """

    attempt: int
    plan: Plan
    handoff_id: str
    prefill_done: PrefillDone | None
    decode_done: DecodeDone | None
    placed_ms: float | None
    first_token_ms: float | None
    verified: HandoffVerified | None = None
    verified_ms: float | None = None
    ended_ms: float | None = None
    computed_before: bool = False
    moves: "tuple[Move, ...]" = ()


@dataclass(frozen=True, slots=True)
class Move:
    """A running answer went to another decode worker. `record` is of the attempt there; its prefill half is the word
    of the worker that it left. `output_tokens` were there before; `pause_ms`: how long no token came for it."""

    record: AttemptRecord
    output_tokens: int
    pause_ms: float


def merge(request_id: str, prompt_tokens: int, record: AttemptRecord, earlier_failures: Sequence[str]) -> KVReceipt:
    """The receipt of a request whose last attempt is `record`. Missing halves leave their fields at zero.

    A decode half that did not come (the answer was cut, the worker was lost) is made up for by what the worker said
    when it had verified the hand-off, and by the router's own clock.
    """
    receipt = KVReceipt(
        request_id=request_id,
        attempt=record.attempt,
        decode_worker=(record.moves[-1].record if record.moves else record).plan.decode_worker,
        prefill_worker=record.plan.prefill_worker or record.plan.decode_worker,
        prompt_tokens=prompt_tokens,
        plan_reason=record.plan.reason,
        earlier_failures=_bounded(earlier_failures),
        queue_ms=record.placed_ms or 0.0,
    )
    if record.plan.prefill_worker is None:
        receipt.transport = LOCAL_TRANSPORT
        if record.placed_ms is not None and record.first_token_ms is not None:
            receipt.prefill_ms = record.first_token_ms - record.placed_ms
    else:
        receipt.handoff_id = record.handoff_id
        if record.prefill_done is not None:
            _add_prefill_half(receipt, record.prefill_done)
        elif record.verified is not None:
            receipt.transport = record.verified.transport
    if record.decode_done is not None:
        _add_decode_half(receipt, record.decode_done)
    else:
        _add_cut_decode_half(receipt, record)
    receipt.migrations.extend(map(_migration, record.moves))
    return receipt


def workers(record: AttemptRecord) -> set[str]:
    """Those that did something for the request and said so."""
    attempts = [record, *(move.record for move in record.moves)]
    prefill = {attempt.plan.prefill_worker for attempt in attempts if attempt.prefill_done is not None}
    return {attempt.plan.decode_worker for attempt in attempts} | {worker for worker in prefill if worker is not None}


def unplaced(request_id: str, prompt_tokens: int, waited_ms: float, failures: Sequence[str]) -> KVReceipt:
    """The receipt of a request that failed before any worker was chosen for it."""
    return KVReceipt(
        request_id=request_id, prompt_tokens=prompt_tokens, queue_ms=waited_ms, earlier_failures=_bounded(failures)
    )


def cached_tokens(record: AttemptRecord, prompt_tokens: int) -> int:
    """Prompt tokens that no worker had to compute for this request, 0 when that is not known.

    Whoever runs the prefill computes all that its own cache lacks, so its cache alone counts: blocks that the decode
    worker has spare a transfer, and blocks shipped to it are no hit at all. What an earlier attempt computed and a
    later one finds is no hit either.
    """
    if record.computed_before:
        return 0
    half = record.decode_done if record.plan.prefill_worker is None else record.prefill_done
    return min(half.cached_tokens, prompt_tokens) if half else 0


def proof_of(receipt: KVReceipt) -> str:
    """One of PROOFS: every block that came was verified and no token of the prompt computed again; some were; nothing
    moved; or a half of the receipt is missing."""
    if receipt.transport == LOCAL_TRANSPORT:
        return "local"
    if receipt.tokens_recomputed:
        return "recomputed"
    return "proved" if receipt.checksum_verified and receipt.transport else "unproved"


def json_fields(message: KVReceipt | Migration) -> dict[str, Any]:
    """Every field by its proto name, zeros included; checksums in hexadecimal, times to a microsecond."""
    fields: dict[str, Any] = {}
    for descriptor in message.DESCRIPTOR.fields:
        value = getattr(message, descriptor.name)
        if isinstance(value, bytes):
            value = value.hex()
        elif isinstance(value, float):
            value = round(value, 3)
        elif descriptor.is_repeated:
            value = [json_fields(item) if isinstance(item, Migration) else item for item in value]
        fields[descriptor.name] = value
    return fields


class ReceiptStore:
    """The receipts of the last `capacity` requests that ended, well or not. Event-loop thread only."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        # With the name of the tenant who asked.
        self._receipts: OrderedDict[str, tuple[str, KVReceipt]] = OrderedDict()

    def put(self, receipt: KVReceipt, tenant: str = "") -> None:
        """Keep a receipt for `tenant`, forgetting the oldest beyond the bound."""
        self._receipts[receipt.request_id] = tenant, receipt
        self._receipts.move_to_end(receipt.request_id)
        while len(self._receipts) > self._capacity:
            self._receipts.popitem(last=False)

    def get(self, request_id: str, tenant: str = "") -> KVReceipt | None:
        """The receipt of a request of `tenant` that has ended; None when unknown, forgotten or another's."""
        owner, receipt = self._receipts.get(request_id, (tenant, None))
        return receipt if owner == tenant else None


def _add_prefill_half(receipt: KVReceipt, done: PrefillDone) -> None:
    receipt.transport = done.transport
    receipt.prefill_cached_tokens = min(done.cached_tokens, receipt.prompt_tokens)
    receipt.blocks_sent = done.blocks_sent
    receipt.bytes_sent = done.bytes_sent
    receipt.checksum = done.checksum
    receipt.queue_ms += done.wait_ms
    receipt.prefill_ms = done.prefill_ms
    receipt.transfer_ms = done.transfer_ms
    receipt.exposed_transfer_ms = done.exposed_transfer_ms
    receipt.hidden_share = _hidden_share(done)
    receipt.transport_detail = done.transport_detail
    receipt.expected_transport = done.expected_transport
    receipt.conversion = done.conversion
    receipt.pulled_tokens = min(done.pulled_tokens, receipt.prefill_cached_tokens)
    receipt.pull_ms = done.pull_ms


def _migration(move: Move) -> Migration:
    record = move.record
    migration = Migration(
        from_worker=record.plan.prefill_worker or "",
        to_worker=record.plan.decode_worker,
        output_tokens=move.output_tokens,
        handoff_id=record.handoff_id,
        pause_ms=move.pause_ms,
    )
    if record.verified is not None:
        migration.transport = record.verified.transport
        migration.checksum_verified = record.verified.checksum_verified
        migration.checksum = record.verified.checksum
    if record.prefill_done is not None:
        migration.transport = record.prefill_done.transport
        migration.blocks_sent = record.prefill_done.blocks_sent
        migration.bytes_sent = record.prefill_done.bytes_sent
        migration.transfer_ms = record.prefill_done.transfer_ms
    if record.decode_done is not None:
        migration.tokens_recomputed = record.decode_done.tokens_recomputed
    return migration


def _hidden_share(done: PrefillDone) -> float:
    """Share of the transfer that ran while prefill still computed; 0 when there was no transfer."""
    if done.transfer_ms <= 0:
        return 0.0
    return 1.0 - min(max(done.exposed_transfer_ms / done.transfer_ms, 0.0), 1.0)


def _bounded(failures: Sequence[str]) -> Sequence[str]:
    """The first lines and the last one, which says how a request failed."""
    if len(failures) <= MAX_FAILURE_LINES:
        return failures
    return [*failures[: MAX_FAILURE_LINES - 1], failures[-1]]


def _add_cut_decode_half(receipt: KVReceipt, record: AttemptRecord) -> None:
    """What is known of a decode half that did not come."""
    verified = record.verified
    if verified is not None:
        receipt.decode_cached_tokens = min(verified.cached_tokens, receipt.prompt_tokens)
        receipt.checksum_verified = verified.checksum_verified
        receipt.checksum = receipt.checksum or verified.checksum
        receipt.commit_ms = verified.commit_ms
    begun_ms = record.verified_ms if record.verified_ms is not None else record.first_token_ms
    if begun_ms is not None and record.ended_ms is not None:
        receipt.decode_ms = max(0.0, record.ended_ms - begun_ms)


def _add_decode_half(receipt: KVReceipt, done: DecodeDone) -> None:
    receipt.decode_cached_tokens = min(done.cached_tokens, receipt.prompt_tokens)
    receipt.tokens_recomputed = done.tokens_recomputed
    receipt.preempted_tokens = done.preempted_tokens
    receipt.checksum_verified = done.checksum_verified
    receipt.checksum = receipt.checksum or done.checksum
    receipt.commit_ms = done.commit_ms
    receipt.decode_ms = done.decode_ms
