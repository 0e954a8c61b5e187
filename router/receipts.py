"""The KV receipt: two workers' halves and the router's times, put together, checked, and kept for a while."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from kvferry_rpc.common_pb2 import ErrorCode, KVReceipt
from kvferry_rpc.internal_pb2 import DecodeDone, PrefillDone
from router.policy import Plan
from runtime.errors import KvferryError

LOCAL_TRANSPORT = "local"
MAX_FAILURE_LINES = 16


@dataclass(frozen=True, slots=True)
class AttemptRecord:
    """All that is known of an attempt when it ends. A half that never arrived is None.

    `placed_ms` (prefill was asked for) and `first_token_ms` are durations since the request came to the router; None =
    did not happen. `computed_before`: an earlier attempt got past its admission.
    """

    attempt: int
    plan: Plan
    handoff_id: str
    prefill_done: PrefillDone | None
    decode_done: DecodeDone | None
    placed_ms: float | None
    first_token_ms: float | None
    computed_before: bool = False


def merge(request_id: str, prompt_tokens: int, record: AttemptRecord, earlier_failures: Sequence[str]) -> KVReceipt:
    """The receipt of a request whose last attempt is `record`. Missing halves leave their fields at zero."""
    receipt = KVReceipt(
        request_id=request_id,
        attempt=record.attempt,
        decode_worker=record.plan.decode_worker,
        prefill_worker=record.plan.prefill_worker or record.plan.decode_worker,
        prompt_tokens=prompt_tokens,
        plan_reason=record.plan.reason,
        earlier_failures=earlier_failures[:MAX_FAILURE_LINES],
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
    if record.decode_done is not None:
        _add_decode_half(receipt, record.decode_done)
    return receipt


def check(record: AttemptRecord, *, strict: bool) -> None:
    """Refuse an answer whose proof does not hold.

    Raises KvferryError: INTERNAL when both workers verified different bytes, HANDOFF_FAILED when `strict` and the
    decode worker computed prompt tokens that were to come from the prefill worker.
    """
    prefill, decode = record.prefill_done, record.decode_done
    if decode is None or record.plan.prefill_worker is None:
        return
    if prefill is not None and decode.checksum_verified and prefill.checksum != decode.checksum:
        raise KvferryError(
            ErrorCode.INTERNAL,
            f"hand-off {record.handoff_id}: {record.plan.prefill_worker} sent blocks with digest "
            f"{prefill.checksum.hex()}, {record.plan.decode_worker} verified {decode.checksum.hex()}",
        )
    if strict and decode.tokens_recomputed:
        raise KvferryError(
            ErrorCode.HANDOFF_FAILED,
            f"{record.plan.decode_worker} computed {decode.tokens_recomputed} prompt tokens itself, "
            "and strict hand-off forbids that",
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


class ReceiptStore:
    """The receipts of the last `capacity` finished requests. Event-loop thread only."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._receipts: OrderedDict[str, KVReceipt] = OrderedDict()

    def put(self, receipt: KVReceipt) -> None:
        """Keep a receipt, forgetting the oldest beyond the bound."""
        self._receipts[receipt.request_id] = receipt
        self._receipts.move_to_end(receipt.request_id)
        while len(self._receipts) > self._capacity:
            self._receipts.popitem(last=False)

    def get(self, request_id: str) -> KVReceipt | None:
        """The receipt of a finished request; None when unknown or forgotten."""
        return self._receipts.get(request_id)


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


def _hidden_share(done: PrefillDone) -> float:
    """Share of the transfer that ran while prefill still computed; 0 when there was no transfer."""
    if done.transfer_ms <= 0:
        return 0.0
    return 1.0 - min(max(done.exposed_transfer_ms / done.transfer_ms, 0.0), 1.0)


def _add_decode_half(receipt: KVReceipt, done: DecodeDone) -> None:
    receipt.decode_cached_tokens = min(done.cached_tokens, receipt.prompt_tokens)
    receipt.tokens_recomputed = done.tokens_recomputed
    receipt.preempted_tokens = done.preempted_tokens
    receipt.checksum_verified = done.checksum_verified
    receipt.checksum = receipt.checksum or done.checksum
    receipt.commit_ms = done.commit_ms
    receipt.decode_ms = done.decode_ms
