"""What one attempt is to do, as both of its workers are told."""

from dataclasses import dataclass, replace

from kvferry_rpc.common_pb2 import ErrorCode, SamplingParams
from router.generation import GenerationRequest
from router.observation.traces import attempt_traceparent
from runtime.errors import KvferryError

_MAX_MS = 2**32 - 1


@dataclass(frozen=True, slots=True)
class Work:
    """A request, continued after `output` tokens that earlier attempts brought.

    `moves`: it is continued where it stood still on another decode worker, which sends the KV of all these tokens but
    the last, and that one with the commit.
    """

    request: GenerationRequest
    attempt: int
    output: tuple[int, ...]
    arrived_at: float
    moves: bool = False

    @property
    def num_output_tokens(self) -> int:
        """Generated tokens at the end of `token_ids`."""
        return len(self.output) - self.moves

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Those that the decode worker gets the KV of: it goes on behind them."""
        return (*self.request.prompt_token_ids, *self.output[: self.num_output_tokens])

    @property
    def num_prompt_logprobs(self) -> int:
        """Log probabilities that a worker has to send before its first token."""
        return len(self.request.prompt_token_ids) - 1 if wants_prompt_logprobs(self.request) else 0

    @property
    def first_token_id(self) -> int | None:
        """The token that comes first from the decode worker, where it is known already."""
        return self.output[-1] if self.moves else None

    @property
    def traceparent(self) -> str:
        """The context of this attempt's span; empty when the request is not traced."""
        return attempt_traceparent(self.request.traceparent, self.request.request_id, self.attempt)

    def remaining_s(self, now: float) -> float:
        """As the function of this name."""
        return remaining_s(self.request, now)

    def remaining_ms(self, now: float) -> int:
        """As `remaining_s`, as workers are told."""
        return min(_MAX_MS, max(1, int(self.remaining_s(now) * 1000)))


def remaining_s(request: GenerationRequest, now: float) -> float:
    """What is left of the request's time. Raises KvferryError (DEADLINE_EXCEEDED) when nothing is."""
    left_s = request.deadline - now
    if left_s <= 0:
        raise deadline_exceeded()
    return left_s


def wants_prompt_logprobs(request: GenerationRequest) -> bool:
    """Whether the prompt is to be scored, so that all of it is computed, whatever is cached."""
    return request.sampling.HasField("prompt_logprobs")


def without_prompt_logprobs(request: GenerationRequest) -> GenerationRequest:
    """The request for attempts that come after its prompt's log probabilities were given out."""
    sampling = SamplingParams()
    sampling.CopyFrom(request.sampling)
    sampling.ClearField("prompt_logprobs")
    return replace(request, sampling=sampling)


def deadline_exceeded() -> KvferryError:
    """The failure of a request whose time is over."""
    return KvferryError(ErrorCode.DEADLINE_EXCEEDED, "the request's deadline passed")
