"""A token source that is an engine in this process: what a cluster's answers are compared with."""

import asyncio
import mmap
from collections import deque
from collections.abc import AsyncGenerator
from pathlib import Path

from engine.build import build_engine, plan_engine
from engine.engine import SequenceOutput
from engine.options import EngineOptions
from engine.wire import build_sequence, finish_reason, prompt_logprobs, token_output
from kvferry_rpc.common_pb2 import FinishReason, KVReceipt
from kvferry_rpc.internal_pb2 import Admit
from router.generation import GenerationRequest, Sink, TokenBatch, TokenEnd
from tests.support.sinks import EnoughTokens, play


class EngineSource:
    """Steps its engine on the event loop, whenever somebody waits for tokens. No workers, no hand-offs, no gRPC."""

    def __init__(self, model: Path, cache_dir: Path) -> None:
        options = EngineOptions(model=str(model), cache_dir=cache_dir, num_blocks=512)
        self._plan = plan_engine(options, available_bytes=None)
        self._engine = build_engine(
            options, self._plan, memoryview(mmap.mmap(-1, self._plan.pool_bytes)), prefill_only=False
        )
        self._outputs: dict[str, deque[SequenceOutput]] = {}

    async def run(self, request: GenerationRequest, sink: Sink[TokenBatch]) -> TokenEnd:
        """See TokenSource. A request that cannot be finished fails the test."""
        return await play(self.tokens(request), sink)

    async def tokens(self, request: GenerationRequest) -> AsyncGenerator[TokenBatch | TokenEnd, None]:
        message = Admit(
            request_id=request.request_id,
            attempt=1,
            prompt_token_ids=request.prompt_token_ids,
            sampling=request.sampling,
            cache_salt=request.cache_salt,
        )
        seq = build_sequence(message, self._plan.limits, request.request_id)
        outputs = self._outputs[seq.seq_id] = deque()
        self._engine.add(seq)
        scored = []
        reason = FinishReason.STOP
        try:
            while True:
                while not outputs:
                    self._step()
                    await asyncio.sleep(0)
                output = outputs.popleft()
                assert output.error is None, output.error
                scored += [entry for part in prompt_logprobs(output.prompt_logprobs) for entry in part.tokens]
                if output.samples:
                    first = seq.num_output_tokens - len(output.samples) - sum(len(later.samples) for later in outputs)
                    batch = tuple(token_output(index, sample) for index, sample in enumerate(output.samples, first))
                    yield TokenBatch(batch, tuple(scored))
                    scored.clear()
                if output.finish_reason is not None:
                    reason = finish_reason(output.finish_reason)
                    break
        except EnoughTokens:
            pass
        finally:
            self._engine.cancel(seq.seq_id)
            del self._outputs[seq.seq_id]
        yield TokenEnd(
            reason=reason,
            prompt_tokens=seq.num_prompt_tokens,
            completion_tokens=seq.num_output_tokens,
            cached_tokens=seq.num_cached_tokens,
            receipt=KVReceipt(request_id=request.request_id, transport="local"),
        )

    def _step(self) -> None:
        schedule = self._engine.schedule()
        for output in self._engine.publish(schedule, self._engine.run(schedule)):
            self._outputs[output.seq.seq_id].append(output)
