"""What a decode worker says for the receipt of a request: what it received and how it ended."""

from engine.sequence import FinishReason, Sequence
from engine.wire import finish_reason
from kv_transfer.events import Committed, ReceiveStats
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


def _commit_ms(stats: ReceiveStats) -> float:
    """Pages are fingerprinted as they land, so what is left to the end is the commit: from the last of them on."""
    if stats.last_write_at is None:
        return 0.0
    return (stats.verified_at - stats.last_write_at) * 1e3
