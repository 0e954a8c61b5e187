"""One request under way at the dispatcher: what outlives its attempts, and what is known of it when it fails."""

from collections.abc import Set
from dataclasses import dataclass, field

from kv_cache.layout import KVCacheLayout
from kvferry_rpc.common_pb2 import FinishReason, KVReceipt
from router.dispatch import receipts
from router.dispatch.course import Course
from router.dispatch.reader import Reader
from router.dispatch.work import Work
from router.generation import GenerationRequest
from router.observation.latency_metrics import RequestMeter
from router.observation.live_requests import LiveRequest
from runtime.errors import KvferryError


@dataclass(slots=True)
class RequestRun:
    """Belongs to the task that awaits `Dispatcher.run`. Times are on the router's clock, in seconds."""

    request: GenerationRequest
    arrived_at: float
    reader: Reader
    meter: RequestMeter
    live: LiveRequest
    output: list[int]  # Token ids given out so far.
    # Of prompt and output, as far as they were needed.
    block_hashes: dict[KVCacheLayout, list[bytes]] = field(default_factory=dict)
    attempts: int = 0
    course: Course | None = None  # The last one.
    # Attempts that failed for another reason than want of room: in a row without a token, and in all.
    failures: int = 0
    failures_in_all: int = 0
    failure_lines: list[str] = field(default_factory=list)
    avoid: set[str] = field(default_factory=set)
    computed_before: bool = False

    def next_work(self, *, moves: bool = False) -> Work:
        """What the next attempt is to do. `moves`: see `Work`."""
        self.attempts += 1
        return Work(self.request, self.attempts, tuple(self.output), self.arrived_at, moves=moves)

    def reason_to_end(self, eos_token_ids: Set[int], max_context_tokens: int | None) -> "FinishReason.ValueType | None":
        """Why the answer so far is complete, if it is: the decode worker was lost before it could say so."""
        sampling = self.request.sampling
        if not self.output:
            return None
        last = self.output[-1]
        is_eos = last in eos_token_ids and not sampling.ignore_eos
        if (is_eos or last in sampling.stop_token_ids) and len(self.output) >= sampling.min_tokens:
            return FinishReason.STOP
        length = len(self.request.prompt_token_ids) + len(self.output)
        if len(self.output) >= sampling.max_tokens or (max_context_tokens and length >= max_context_tokens):
            return FinishReason.LENGTH
        return None

    def failed_receipt(self, error: BaseException, now: float) -> KVReceipt:
        """What is known, and `error` as the last of its failures."""
        if isinstance(error, KvferryError):
            line = f"{error.code_name}: {error.message}"
        elif isinstance(error, Exception):
            line = f"internal: {type(error).__name__}"
        else:
            line = "cancelled: the caller left"
        lines = list(self.failure_lines)
        if lines and lines[-1].endswith(line):
            line = lines.pop()
        lines.append(receipts.FINAL_FAILURE + line)
        request_id, prompt_tokens = self.request.request_id, len(self.request.prompt_token_ids)
        if self.course is None:
            return receipts.unplaced(request_id, prompt_tokens, (now - self.arrived_at) * 1000, lines)
        return receipts.merge(request_id, prompt_tokens, self.course.record(), lines)
