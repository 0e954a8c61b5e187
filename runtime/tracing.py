"""Traces: who did what for one request, from when to when, under one id through all processes.

Off by default, and then nothing of OpenTelemetry is imported. A span is made when its work is over, from times that
were taken anyway, so a token costs nothing. The contexts travel as W3C `traceparent` headers; `span_writer.py` hands
spans to OpenTelemetry.

Span ids are digests of what a span is about, so that a router can name the parent of a worker's spans before it has
made that parent.
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from runtime.clock import Clock
from runtime.config import flag

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_NO_SPAN = "0" * 16
_SAMPLED = 1

Attribute = str | int | float | bool


@dataclass(frozen=True, slots=True)
class TraceContext:
    """A place in a trace: new spans belong below `span_id`; empty: below none. Both are lower-case hexadecimal."""

    trace_id: str
    span_id: str = ""

    def child(self, *names: object) -> "TraceContext":
        """The span of that name below this one. Names must tell it from all others of the trace."""
        text = "\0".join([self.trace_id, self.span_id, *map(str, names)])
        digest = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
        return TraceContext(self.trace_id, digest)

    def __str__(self) -> str:
        """As a W3C `traceparent`, sampled; without a span its id is zero, which only this package understands."""
        return f"00-{self.trace_id}-{self.span_id or _NO_SPAN}-01"


def client_context(traceparent: str) -> tuple[TraceContext | None, bool]:
    """What a client's header says: the place that it names, None when there is none to be had from it, and whether it
    wants its trace recorded (true as well when it says nothing).

    W3C Trace Context, Level 1: a version that is not known is read like version 0; ff, ids of zero alone and upper
    case are not valid.
    """
    match = _TRACEPARENT.fullmatch(traceparent.strip())
    if match is None:
        return None, True
    version, trace_id, span_id, flags, rest = match.groups()
    if version == "ff" or (version == "00" and rest) or not trace_id.strip("0") or not span_id.strip("0"):
        return None, True
    return TraceContext(trace_id, span_id), bool(int(flags, 16) & _SAMPLED)


def inner_context(traceparent: str) -> TraceContext | None:
    """A context that another process of the cluster, or part of this one, wrote down; None = no trace."""
    match = _TRACEPARENT.fullmatch(traceparent)
    if match is None:
        return None
    span_id = match[3]
    return TraceContext(match[2], "" if span_id == _NO_SPAN else span_id)


def trace_id_of(traceparent: str) -> str:
    """For log lines; empty when there is no trace."""
    trace = inner_context(traceparent)
    return trace.trace_id if trace is not None else ""


@dataclass(frozen=True, slots=True)
class Span:
    """Something that was done. Times are in seconds on the monotonic clock of the process. `error`: why it failed,
    empty when it did not. `is_server`: it answers somebody outside of this process."""

    name: str
    context: TraceContext
    parent_id: str
    started_at: float
    ended_at: float
    attributes: Mapping[str, Attribute]
    error: str = ""
    is_server: bool = False


def child_span(
    parent: Span, name: str, started_at: float | None, ended_at: float | None, **attributes: Attribute
) -> list[Span]:
    """A part of what `parent` did: one span, or none if one of the times is not known. A part that began before
    anything of it was awaited counts from the parent's begin."""
    if started_at is None or ended_at is None:
        return []
    begin = min(max(started_at, parent.started_at), ended_at)
    fields = {f"kvferry.{key}": value for key, value in attributes.items()}
    return [Span(name, parent.context.child(name), parent.context.span_id, begin, ended_at, fields)]


class Tracer(Protocol):
    """Takes spans. Any thread; never blocks and never raises: what it has no room for is lost."""

    @property
    def process(self) -> str:
        """The name of this process."""
        ...

    def emit(self, spans: Sequence[Span]) -> None:
        """They are over."""
        ...

    def close(self) -> None:
        """Deliver what is left, in a few seconds at most. Blocks. Idempotent."""
        ...


@dataclass(frozen=True, kw_only=True)
class TracingOptions:
    """Flags of all processes. Both may be set."""

    otlp_endpoint: str = flag("", "OTLP collector (gRPC) for traces, such as http://127.0.0.1:4317. Empty: none.")
    trace_file: Path | None = flag(None, "File that gets traces, one JSON object a line. Processes may share it.")

    def validate(self) -> None:
        """Raises ValueError naming the flag."""
        if self.otlp_endpoint and not self.otlp_endpoint.startswith(("http://", "https://")):
            raise ValueError("--otlp-endpoint must begin with http:// or https://")
        if "@" in self.otlp_endpoint:
            # Flags and files are shown to whoever asks; and nobody would read it.
            raise ValueError("--otlp-endpoint takes no user or password")


def open_tracer(options: TracingOptions, process: str, clock: Clock) -> Tracer | None:
    """None when no flag asks for traces. `process` names the service instance.

    Raises ValueError when OpenTelemetry is not installed, and OSError when the file cannot be written.
    """
    if not options.otlp_endpoint and options.trace_file is None:
        return None
    try:
        from runtime.span_writer import SpanWriter
    except ImportError as error:
        raise ValueError(f"--otlp-endpoint and --trace-file need the extra otel: kvferry[otel] ({error})") from None
    return SpanWriter(options.otlp_endpoint, options.trace_file, process, clock)
