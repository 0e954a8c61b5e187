"""What a decode worker says for the receipt of a request: what it received, how it ended, and what it handed over."""

from engine.sequence import FinishReason, Sequence
from engine.wire import finish_reason
from kv_transfer.events import Committed, ReceiveStats, SendStats
from kvferry_rpc import internal_pb2


def verified_half(cached_tokens: int, stats: ReceiveStats) -> internal_pb2.HandoffVerified:
    """Said before the first token."""
    return internal_pb2.HandoffVerified(
        cached_tokens=cached_tokens,
        checksum_verified=stats.verified,
        checksum=stats.digest,
        commit_ms=_commit_ms(stats),
        transport=stats.transport,
    )


def decode_half(
    seq: Sequence, cached_tokens: int, commit: Committed | None, reason: FinishReason, decode_ms: float
) -> internal_pb2.DecodeDone:
    """Said with the end of the answer. `commit`: of the hand-off that brought the prompt's KV, if one did."""
    done = internal_pb2.DecodeDone(
        reason=finish_reason(reason),
        cached_tokens=cached_tokens,
        preempted_tokens=seq.preempted_tokens,
        decode_ms=decode_ms,
    )
    if commit is not None:
        done.tokens_recomputed = seq.arrival_tokens_computed
        done.checksum_verified = commit.stats.verified
        done.checksum = commit.stats.digest
        done.commit_ms = _commit_ms(commit.stats)
    return done


def sender_half(stats: SendStats) -> internal_pb2.PrefillDone:
    """Said when another decode worker has what was handed over to it. Nothing was computed meanwhile."""
    first, last = stats.first_write_at, stats.last_write_at
    transfer_ms = 0.0 if first is None or last is None else (last - first) * 1e3
    return internal_pb2.PrefillDone(
        blocks_sent=stats.num_blocks,
        bytes_sent=stats.size_bytes,
        transport=stats.transport,
        checksum=stats.digest,
        transfer_ms=transfer_ms,
        exposed_transfer_ms=transfer_ms,
        transport_detail=stats.transport_detail,
        expected_transport=stats.expected_transport,
        conversion=stats.conversion,
    )


def _commit_ms(stats: ReceiveStats) -> float:
    """Pages are fingerprinted as they land, so what is left to the end is the commit: from the last of them on."""
    if stats.last_write_at is None:
        return 0.0
    return (stats.verified_at - stats.last_write_at) * 1e3
