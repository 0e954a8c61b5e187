"""How long requests take: histograms under the names that the field has settled on, and the meter of one request."""

from prometheus_client import CollectorRegistry

from kvferry_rpc.common_pb2 import KVReceipt
from router.admission.slo import SloClass
from runtime.clock import Clock
from runtime.fast_metrics import FastCounter, FastHistogram
from runtime.telemetry import LATENCY_BUCKETS_S


class LatencyMetrics:
    """Event-loop thread only. Those that clients feel are measured here, those of workers come from receipts."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.ttft = latency("kvferry_time_to_first_token_seconds", "Arrival to first token.", registry)
        self.ttst = latency("kvferry_time_to_second_token_seconds", "Arrival to second token.", registry)
        self.itl = latency("kvferry_inter_token_latency_seconds", "Gap between two tokens of a request.", registry)
        self.tpot = latency(
            "kvferry_request_time_per_output_token_seconds",
            "Mean gap between the tokens of a finished request of two or more.",
            registry,
        )
        self.e2e = latency(
            "kvferry_e2e_request_latency_seconds", "Arrival to last token, finished requests only.", registry
        )
        self._queue = latency(
            "kvferry_request_queue_time_seconds", "Arrival to the start of prefill compute, per receipt.", registry
        )
        self._prefill = latency(
            "kvferry_request_prefill_time_seconds", "First chunk of the prompt to first token, per receipt.", registry
        )
        self._decode = latency(
            "kvferry_request_decode_time_seconds", "KV in place on the decode worker to last token, per receipt.",
            registry,
        )  # fmt: skip
        self.prompt_tokens = FastCounter("kvferry_prompt_tokens", "Tokens of prompts of finished requests.", registry)
        self.prompt_tokens_cached = FastCounter(
            "kvferry_prompt_tokens_cached", "Of those, the ones that no worker had to compute.", registry
        )
        self.tokens_generated = FastCounter("kvferry_tokens_generated", "Tokens given to callers.", registry)

    def finished(self, receipt: KVReceipt, cached_tokens: int) -> None:
        """A request has its answer."""
        self.prompt_tokens.inc(receipt.prompt_tokens)
        self.prompt_tokens_cached.inc(cached_tokens)
        self._queue.observe(receipt.queue_ms / 1000)
        self._prefill.observe(receipt.prefill_ms / 1000)
        self._decode.observe(receipt.decode_ms / 1000)


class RequestMeter:
    """Measures one request. Made by `RouterMetrics.request`."""

    __slots__ = (
        "_first_token_at",
        "_last_token_at",
        "_latency",
        "_now",
        "_slo",
        "_started_at",
        "num_tokens",
        "prompt_tokens",
        "slo_outcome",
    )

    def __init__(self, latencies: LatencyMetrics, clock: Clock, slo: SloClass | None) -> None:
        self._latency = latencies
        self._now = clock.now
        self._slo = slo
        self._started_at = clock.now()
        self._first_token_at: float | None = None
        self._last_token_at: float | None = None
        self.num_tokens = 0
        self.prompt_tokens = 0
        self.slo_outcome: str | None = None

    def tokens(self, count: int) -> None:
        """`count` (1 or more) tokens came in one batch. The gap before a batch is shared out over its tokens."""
        now, latencies = self._now(), self._latency
        if self._last_token_at is None:
            latencies.ttft.observe(now - self._started_at)
            self._first_token_at = now
        else:
            latencies.itl.observe((now - self._last_token_at) / count, count)
        if self.num_tokens < 2 <= self.num_tokens + count:
            latencies.ttst.observe(now - self._started_at)
        self._last_token_at = now
        self.num_tokens += count
        latencies.tokens_generated.inc(count)

    def finished(self, receipt: KVReceipt, cached_tokens: int) -> None:
        """The request has its answer."""
        self._latency.e2e.observe(self._now() - self._started_at)
        self._latency.finished(receipt, cached_tokens)
        self.prompt_tokens = receipt.prompt_tokens
        first, last = self._first_token_at, self._last_token_at
        if first is None or last is None:
            return
        tpot_s = (last - first) / (self.num_tokens - 1) if self.num_tokens > 1 else None
        if tpot_s is not None:
            self._latency.tpot.observe(tpot_s)
        if self._slo is not None:
            self.slo_outcome = self._slo.verdict(first - self._started_at, tpot_s)


def latency(name: str, help_text: str, registry: CollectorRegistry) -> FastHistogram:
    """A histogram of seconds, without labels."""
    return FastHistogram(name, help_text, LATENCY_BUCKETS_S, registry)
