"""What a prefill worker says for the receipt of a request: what it computed, and how that went out."""

from kv_transfer.events import SendStats
from kv_transfer.receipt import sent_half
from kvferry_rpc.internal_pb2 import PrefillDone
from prefill_worker.job import Job


def prefill_half(job: Job, stats: SendStats) -> PrefillDone:
    """Said when the decode worker has verified all of it; the job's first token was sampled."""
    sampled_at = job.sampled_at
    assert sampled_at is not None, "there is no commit without a token"
    started_at = sampled_at if job.started_at is None else job.started_at
    done = sent_half(stats, exposed_from=sampled_at)
    done.cached_tokens = job.submit.sequence.num_cached_tokens
    done.pulled_tokens = job.pulled_tokens
    done.pull_ms = job.pull.took_ms if job.pull else 0.0
    done.wait_ms = (started_at - job.submit.arrived_at) * 1e3
    done.prefill_ms = (sampled_at - started_at) * 1e3
    return done
