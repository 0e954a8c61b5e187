"""Trace contexts: what a client's header says, and how the spans of several processes find each other."""

import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.clock import ManualClock
from runtime.tracing import (
    Span,
    TraceContext,
    TracingOptions,
    child_span,
    client_context,
    inner_context,
    open_tracer,
    trace_id_of,
)

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.mark.parametrize(
    ("header", "context", "wanted"),
    [
        (f"00-{TRACE}-{SPAN}-01", TraceContext(TRACE, SPAN), True),
        (f" 00-{TRACE}-{SPAN}-03 ", TraceContext(TRACE, SPAN), True),
        (f"00-{TRACE}-{SPAN}-00", TraceContext(TRACE, SPAN), False),
        (f"cc-{TRACE}-{SPAN}-01-of the future", TraceContext(TRACE, SPAN), True),
        (f"00-{TRACE}-{SPAN}-01-of the future", None, True),
        (f"ff-{TRACE}-{SPAN}-01", None, True),
        (f"00-{'0' * 32}-{SPAN}-01", None, True),
        (f"00-{TRACE}-{'0' * 16}-01", None, True),
        (f"00-{TRACE.upper()}-{SPAN}-01", None, True),
        (f"00-{TRACE}-{SPAN}", None, True),
        ("", None, True),
        ("nonsense", None, True),
    ],
)
def test_a_clients_header_is_read_as_the_standard_says(header: str, context: TraceContext | None, wanted: bool) -> None:
    assert client_context(header) == (context, wanted)


@given(st.text(max_size=80))
@settings(deadline=None, max_examples=100)
def test_no_header_can_break_the_reader(header: str) -> None:
    context, _ = client_context(header)
    assert context is None or inner_context(str(context)) == context
    inner_context(header)


def test_a_context_survives_its_way_to_another_process_also_without_a_span() -> None:
    for context in (TraceContext(TRACE, SPAN), TraceContext(TRACE)):
        assert inner_context(str(context)) == context
    assert trace_id_of(str(TraceContext(TRACE))) == TRACE
    assert trace_id_of("") == ""


def test_two_processes_give_a_span_the_same_id_and_different_spans_different_ones() -> None:
    root = TraceContext(TRACE, SPAN)
    assert root.child("attempt", 1) == inner_context(str(root)).child("attempt", 1)  # type: ignore[union-attr]
    others = [root.child("attempt", 2), root.child("attempt", 1).child("x"), TraceContext("1" * 32, SPAN).child("a")]
    assert len({context.span_id for context in [root, root.child("attempt", 1), *others]}) == 5


def test_a_part_lies_within_its_whole_and_is_left_out_when_it_did_not_happen() -> None:
    whole = Span("whole", TraceContext(TRACE, SPAN), "", 10.0, 20.0, {})
    (part,) = child_span(whole, "part", 9.0, 12.0, bytes=3)
    assert (part.started_at, part.ended_at, part.parent_id) == (10.0, 12.0, SPAN)
    assert part.attributes == {"kvferry.bytes": 3}
    assert child_span(whole, "part", None, 12.0) == child_span(whole, "part", 11.0, None) == []


def test_without_a_flag_there_is_no_tracer_and_nothing_of_opentelemetry_is_imported() -> None:
    assert open_tracer(TracingOptions(), "decode-0", ManualClock()) is None
    imports = "import sys, router.observation.traces, runtime.worker_host"
    code = f"{imports}; sys.exit(any('opentelemetry' in module for module in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


def test_an_endpoint_that_is_no_url_is_refused() -> None:
    with pytest.raises(ValueError, match="--otlp-endpoint"):
        TracingOptions(otlp_endpoint="localhost:4317").validate()


def test_without_the_extra_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "runtime.span_writer", None)
    with pytest.raises(ValueError, match=r"kvferry\[otel\]"):
        open_tracer(TracingOptions(otlp_endpoint="http://127.0.0.1:1"), "decode-0", ManualClock())
