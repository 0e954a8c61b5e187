"""A token source that plays a script: what the cluster would have answered, and how it would have failed."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable
from dataclasses import dataclass

from kvferry_rpc.common_pb2 import FinishReason, KVReceipt, PromptTokenLogprob, TokenLogprob, TokenOutput
from router.generation import GenerationRequest, Sink, TokenBatch, TokenEnd
from tests.support.sinks import EnoughTokens, play


@dataclass(frozen=True)
class Finish:
    """The last step of a script: why the answer ended, and what it found in a cache."""

    reason: "FinishReason.ValueType" = FinishReason.STOP
    cached_tokens: int = 0


# Token ids of one batch; a failure to raise; something to wait for; or the end.
Step = list[int] | Exception | asyncio.Event | Finish
Script = Callable[[GenerationRequest], Iterable[Step]]


class ScriptedSource:
    """Plays `script(request)` for each request and remembers what happened to it.

    A script without a Finish at its end stops when its tokens are used up. Logprobs, when asked for, are
    -1/(1 + id % 7) for every token, those of the prompt too.
    """

    def __init__(self, script: Script) -> None:
        self.script = script
        self.requests: list[GenerationRequest] = []
        self.running: set[str] = set()
        self.cancelled: list[str] = []
        self.had_enough: list[str] = []
        self.changed = asyncio.Event()

    async def run(self, request: GenerationRequest, sink: Sink[TokenBatch]) -> TokenEnd:
        """See TokenSource. It pushes what `tokens` yields."""
        return await play(self.tokens(request), sink)

    async def tokens(self, request: GenerationRequest) -> AsyncGenerator[TokenBatch | TokenEnd, None]:
        self.requests.append(request)
        self.running.add(request.request_id)
        self.changed.set()
        count = 0
        finish = Finish()
        try:
            for step in self.script(request):
                if isinstance(step, Exception):
                    try:
                        raise step
                    finally:
                        # Its traceback has this frame; `tests/router/test_garbage.py` looks for such cycles.
                        del step
                if isinstance(step, asyncio.Event):
                    await step.wait()
                elif isinstance(step, Finish):
                    finish = step
                else:
                    scored = () if count else _prompt_logprobs(request)
                    yield TokenBatch(tuple(_output(request, count + i, token) for i, token in enumerate(step)), scored)
                    count += len(step)
        except EnoughTokens:
            self.had_enough.append(request.request_id)
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled.append(request.request_id)
            raise
        finally:
            self.running.discard(request.request_id)
            self.changed.set()
        yield _end(request, finish, count)

    async def wait_until(self, condition: Callable[["ScriptedSource"], bool], timeout_s: float = 5.0) -> None:
        """Return once `condition(self)` holds. Raises TimeoutError."""
        async with asyncio.timeout(timeout_s):
            while not condition(self):
                self.changed.clear()
                await self.changed.wait()


def _output(request: GenerationRequest, index: int, token_id: int) -> TokenOutput:
    output = TokenOutput(index=index, token_id=token_id)
    if request.sampling.HasField("num_logprobs"):
        output.logprob = -1 / (1 + token_id % 7)
        output.top_logprobs.extend(
            TokenLogprob(token_id=token_id + rank, logprob=output.logprob - rank)
            for rank in range(request.sampling.num_logprobs)
        )
    return output


def _prompt_logprobs(request: GenerationRequest) -> tuple[PromptTokenLogprob, ...]:
    if not request.sampling.HasField("prompt_logprobs"):
        return ()
    scored = []
    for position, token_id in enumerate(request.prompt_token_ids[1:], start=1):
        logprob = -1 / (1 + token_id % 7)
        tops = [
            TokenLogprob(token_id=token_id + rank, logprob=logprob - rank)
            for rank in range(request.sampling.prompt_logprobs)
        ]
        scored.append(
            PromptTokenLogprob(position=position, token_id=token_id, logprob=logprob, rank=1, top_logprobs=tops)
        )
    return tuple(scored)


def _end(request: GenerationRequest, finish: Finish, count: int) -> TokenEnd:
    prompt_tokens = len(request.prompt_token_ids)
    return TokenEnd(
        reason=finish.reason,
        prompt_tokens=prompt_tokens,
        completion_tokens=count,
        cached_tokens=finish.cached_tokens,
        receipt=KVReceipt(
            request_id=request.request_id, prompt_tokens=prompt_tokens, transport="shm", checksum=b"\x01"
        ),
    )
