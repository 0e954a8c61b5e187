"""What a prefill worker says for the receipt of a request: what it computed, and how that went out."""

from kv_transfer.events import SendStats
from kvferry_rpc.internal_pb2 import PrefillDone
from prefill_worker.job import Job


def prefill_half(job: Job, stats: SendStats) -> PrefillDone:
    """Said when the decode worker has verified all of it; the job's first token was sampled."""
    submit, sampled_at = job.submit, job.sampled_at
    assert sampled_at is not None, "there is no commit without a token"
    started_at = sampled_at if job.started_at is None else job.started_at
    first, last = stats.first_write_at, stats.last_write_at
    transfer_s = exposed_s = 0.0
    if first is not None and last is not None:
        transfer_s, exposed_s = last - first, max(0.0, last - max(first, sampled_at))
    return PrefillDone(
        cached_tokens=submit.sequence.num_cached_tokens,
        pulled_tokens=job.pulled_tokens,
        pull_ms=job.pull.took_ms if job.pull else 0.0,
        blocks_sent=stats.num_blocks,
        bytes_sent=stats.size_bytes,
        transport=stats.transport,
        checksum=stats.digest,
        wait_ms=(started_at - submit.arrived_at) * 1e3,
        prefill_ms=(sampled_at - started_at) * 1e3,
        transfer_ms=transfer_s * 1e3,
        exposed_transfer_ms=exposed_s * 1e3,
        transport_detail=stats.transport_detail,
        expected_transport=stats.expected_transport,
        conversion=stats.conversion,
    )
