"""The spans that two real workers make of one request: below the attempt that they were told, from its own times."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from kvferry_rpc.common_pb2 import SamplingParams
from runtime.tracing import Span, TraceContext
from tests.support.worker_pair import WorkerPair

ATTEMPT = TraceContext("4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7")
PROMPT = list(range(5, 45))
SAMPLING = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)


class Recorder:
    """A tracer that keeps what it gets."""

    def __init__(self, process: str) -> None:
        self.process = process
        self.spans: list[Span] = []

    def emit(self, spans: Sequence[Span]) -> None:
        self.spans.extend(spans)

    def close(self) -> None: ...

    def shape(self) -> list[tuple[str, str]]:
        """Each span's name with that of the one above it; that of the first is the attempt's."""
        names = {span.context.span_id: span.name for span in self.spans} | {ATTEMPT.span_id: "attempt"}
        assert len(names) == len(self.spans) + 1
        return [(names[span.parent_id], span.name) for span in self.spans]

    def check_times(self) -> None:
        whole = self.spans[0]
        for span in self.spans:
            assert whole.started_at <= span.started_at <= span.ended_at <= whole.ended_at
            assert span.context.trace_id == ATTEMPT.trace_id


@pytest.fixture
def recorders() -> tuple[Recorder, Recorder]:
    return Recorder("prefill-0"), Recorder("decode-0")


def test_a_hand_off_is_seen_from_both_ends(checkpoint: Path, cache: Path, recorders: tuple[Recorder, Recorder]) -> None:
    prefill, decode = recorders
    with WorkerPair(checkpoint, cache, tracers=recorders) as pair:
        pair.run(PROMPT, SAMPLING)
        assert prefill.spans == decode.spans == [], "nobody asked for a trace"
        pair.trace = ATTEMPT
        outcome = pair.run(list(reversed(PROMPT)), SAMPLING)
        # The last word to the router comes first.
        pair.wait_until(lambda: len(prefill.spans) == 4)
    top = ("attempt", "prefill worker")
    assert prefill.shape() == [top, *(("prefill worker", name) for name in ("wait", "compute", "transfer"))]
    top = ("attempt", "decode worker")
    assert decode.shape() == [top, *(("decode worker", name) for name in ("receive", "verify", "decode"))]
    prefill.check_times()
    decode.check_times()
    assert prefill.spans[0].attributes["kvferry.worker"] == "prefill-0"
    assert prefill.spans[0].attributes["kvferry.prompt_tokens"] == len(PROMPT)
    assert decode.spans[0].attributes["kvferry.output_tokens"] == 6
    assert decode.spans[0].attributes["kvferry.end"] == "length"
    assert decode.spans[2].attributes["kvferry.checksum_verified"] is True
    done = outcome.prefill_done
    assert done is not None
    assert prefill.spans[3].attributes["kvferry.bytes"] == done.bytes_sent
    assert (prefill.spans[2].ended_at - prefill.spans[2].started_at) * 1e3 == pytest.approx(done.prefill_ms, rel=1e-3)


def test_a_prompt_that_decode_computes_has_no_hand_off_in_its_trace(
    checkpoint: Path, cache: Path, recorders: tuple[Recorder, Recorder]
) -> None:
    prefill, decode = recorders
    with WorkerPair(checkpoint, cache, tracers=recorders) as pair:
        pair.trace = ATTEMPT
        pair.run(PROMPT, SAMPLING, local_prefill=True)
    assert decode.shape() == [("attempt", "decode worker"), ("decode worker", "decode")]
    assert decode.spans[0].attributes["kvferry.local_prefill"] is True
    assert prefill.spans == []


def test_what_was_cancelled_or_failed_says_so(
    checkpoint: Path, cache: Path, recorders: tuple[Recorder, Recorder]
) -> None:
    prefill, decode = recorders
    with WorkerPair(checkpoint, cache, tracers=recorders) as pair:
        pair.trace = ATTEMPT
        left = pair.admit(PROMPT, SAMPLING)
        assert left.ticket() is not None
        pair.cancel(left)
        late = pair.admit(PROMPT, SAMPLING, deadline_s=0.0)
        ticket = late.ticket()
        assert ticket is not None
        pair.prefill_into(late, ticket, deadline_s=0.0)
        pair.wait_until(lambda: len(decode.spans) == 2 and bool(prefill.spans))
    ends = [(span.attributes["kvferry.end"], span.error) for span in decode.spans]
    assert sorted(ends) == [("cancelled", ""), ("deadline_exceeded", "deadline_exceeded")]
    assert prefill.spans[0].error
