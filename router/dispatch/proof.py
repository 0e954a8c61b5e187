"""What must hold before an answer counts, and what a strict router insists on besides. Pure.

Always: where both workers name a digest, it is the same one. With `strict`, all of `Clause`: what no cache had of the
prompt was computed on a prefill worker and nowhere else, both halves of the hand-off are there, every block was
verified, and no slower transport was used than required. Whatever fails that fails the request; there is no second try,
since a cluster that cannot prove one hand-off is to be looked at.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from kv_transfer.choice import degraded
from kvferry_rpc.common_pb2 import ErrorCode
from router.dispatch.receipts import AttemptRecord
from runtime.errors import KvferryError


class Clause(Enum):
    """What strict hand-off insists on. The values are the `field` of the error and a label of a metric."""

    LOCAL_PREFILL = "prefill_worker"
    RECOMPUTED = "tokens_recomputed"
    UNVERIFIED = "checksum_verified"
    DIGESTS = "checksum"
    TRANSPORT = "transport"
    PREFILL_HALF = "prefill_half"
    DECODE_HALF = "decode_half"


class StrictRefusal(KvferryError):
    """The answer is not given out: strict hand-off forbids it. HANDOFF_FAILED, and not to be tried again."""

    def __init__(self, clause: Clause, message: str, *, retry_after_ms: int = 0) -> None:
        super().__init__(
            ErrorCode.HANDOFF_FAILED,
            f"strict hand-off: {message}",
            field=clause.value,
            retry_after_ms=retry_after_ms,
        )
        self.clause = clause


@dataclass(frozen=True, slots=True)
class HandoffRules:
    """`required_transports`: the only ones that will do; none named = the one that both ends expected, or a better one.

    Without `strict` a transport that will not do is a warning.
    """

    strict: bool = False
    required_transports: tuple[str, ...] = ()

    def should_have_used(self, used: str, expected: str) -> str:
        """The transport that `used` falls short of (the first of those required); empty when it will do."""
        if self.required_transports:
            return "" if used in self.required_transports else self.required_transports[0]
        return expected if degraded(used, expected) else ""


def check_so_far(rules: HandoffRules, record: AttemptRecord) -> None:
    """Refuse what is known to be wrong, while the rest may still come.

    Raises StrictRefusal; without `strict` only KvferryError (INTERNAL) for two digests of one hand-off.
    """
    if rules.strict:
        _check_place(record)
    if (digests := _unequal_digests(record)) is not None:
        message = (
            f"hand-off {record.handoff_id}: {record.plan.prefill_worker} sent blocks with digest {digests[0]}, "
            f"{record.plan.decode_worker} verified {digests[1]}"
        )
        if rules.strict:
            raise StrictRefusal(Clause.DIGESTS, message)
        raise KvferryError(ErrorCode.INTERNAL, message, field=Clause.DIGESTS.value)
    if rules.strict:
        _check_transport(rules, record)


def check_whole(rules: HandoffRules, record: AttemptRecord) -> None:
    """As `check_so_far`, when nothing more will come: with `strict`, neither half may be missing, nor of any move."""
    for move in record.moves:
        check_whole(rules, move.record)
    check_so_far(rules, record)
    if not rules.strict:
        return
    if record.verified is None and record.decode_done is None:
        raise lacks_decode_half(record, "its half of the receipt is missing")
    if record.prefill_done is None:
        raise lacks_prefill_half(record, "it did not report in time")


def lacks_prefill_half(record: AttemptRecord, why: str) -> StrictRefusal:
    """Nobody says what was sent."""
    message = f"hand-off {record.handoff_id}: no receipt from {record.plan.prefill_worker}: {why}"
    return StrictRefusal(Clause.PREFILL_HALF, message)


def lacks_decode_half(record: AttemptRecord, why: str) -> StrictRefusal:
    """Nobody says that what came was verified."""
    message = f"hand-off {record.handoff_id}: no receipt from {record.plan.decode_worker}: {why}"
    return StrictRefusal(Clause.DECODE_HALF, message)


def _check_place(record: AttemptRecord) -> None:
    """The prompt was computed on the prefill worker, and what came from there was verified."""
    decode_worker = record.plan.decode_worker
    if record.plan.prefill_worker is None:
        raise StrictRefusal(Clause.LOCAL_PREFILL, f"{decode_worker} computed the prompt itself: {record.plan.reason}")
    if any(not half.checksum_verified for half in (record.verified, record.decode_done) if half is not None):
        message = (
            f"hand-off {record.handoff_id}: {decode_worker} did not verify the blocks from {record.plan.prefill_worker}"
        )
        raise StrictRefusal(Clause.UNVERIFIED, message)
    if record.decode_done is not None and record.decode_done.tokens_recomputed:
        message = (
            f"{decode_worker} computed {record.decode_done.tokens_recomputed} prompt tokens itself "
            f"that {record.plan.prefill_worker} was to send"
        )
        raise StrictRefusal(Clause.RECOMPUTED, message)


def _unequal_digests(record: AttemptRecord) -> tuple[str, str] | None:
    """What was sent and what was verified, in hexadecimal, if both are known and differ."""
    if record.plan.prefill_worker is None or record.prefill_done is None:
        return None
    sent = record.prefill_done.checksum
    for half in (record.verified, record.decode_done):
        if half is not None and half.checksum_verified and half.checksum != sent:
            return sent.hex(), half.checksum.hex()
    return None


def _check_transport(rules: HandoffRules, record: AttemptRecord) -> None:
    for used, expected in _transports(record):
        if wanted := rules.should_have_used(used, expected):
            wanted = " or ".join(rules.required_transports) or wanted
            reason = "is required" if rules.required_transports else "was expected"
            message = (
                f"hand-off {record.handoff_id}: KV went from {record.plan.prefill_worker} to "
                f"{record.plan.decode_worker} over {used or 'an unknown transport'}, and {wanted} {reason}"
            )
            raise StrictRefusal(Clause.TRANSPORT, message)


def _transports(record: AttemptRecord) -> Iterator[tuple[str, str]]:
    """(used, expected) as each end tells it; only the sender knows what was expected."""
    if record.verified is not None:
        yield record.verified.transport, ""
    if record.prefill_done is not None:
        yield record.prefill_done.transport, record.prefill_done.expected_transport
