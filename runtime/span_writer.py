"""Hands spans to OpenTelemetry's SDK. Imported only where traces are asked for.

Everything that the SDK would read from the environment is said here.
"""

import os
import time
from collections.abc import Sequence
from pathlib import Path

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

from runtime.clock import Clock
from runtime.tracing import Span, TraceContext

_SCOPE = InstrumentationScope("kvferry")
_MAX_WAITING = 8192
_MAX_BATCH = 512
_EXPORT_EVERY_MS = 500.0
_EXPORT_TIMEOUT_S = 5.0


class SpanWriter:
    """A `Tracer`. Threads of the SDK export; whatever waits for them beyond a bound is lost."""

    def __init__(self, endpoint: str, path: Path | None, process: str, clock: Clock) -> None:
        """Raises OSError when the file cannot be opened."""
        self.process = process
        self._clock = clock
        self._resource = Resource({"service.name": "kvferry", "service.instance.id": process})
        exporters: list[SpanExporter] = []
        if path is not None:
            exporters.append(JsonLinesExporter(path))
        if endpoint:
            exporters.append(_otlp_exporter(endpoint))
        self._processors = [
            BatchSpanProcessor(
                exporter,
                max_queue_size=_MAX_WAITING,
                schedule_delay_millis=_EXPORT_EVERY_MS,
                max_export_batch_size=_MAX_BATCH,
                export_timeout_millis=_EXPORT_TIMEOUT_S * 1000,
            )
            for exporter in exporters
        ]

    def emit(self, spans: Sequence[Span]) -> None:
        # Anew each time: the wall clock may have been set.
        epoch = time.time() - self._clock.now()
        for span in spans:
            readable = self._readable(span, epoch)
            for processor in self._processors:
                processor.on_end(readable)

    def close(self) -> None:
        processors, self._processors = self._processors, []
        for processor in processors:
            processor.shutdown()  # type: ignore[no-untyped-call]

    def _readable(self, span: Span, epoch: float) -> ReadableSpan:
        parent = TraceContext(span.context.trace_id, span.parent_id) if span.parent_id else None
        return ReadableSpan(
            name=span.name,
            context=_sdk_context(span.context, is_remote=False),
            parent=_sdk_context(parent, is_remote=span.is_server) if parent else None,
            resource=self._resource,
            attributes=dict(span.attributes),
            kind=SpanKind.SERVER if span.is_server else SpanKind.INTERNAL,
            status=Status(StatusCode.ERROR, span.error) if span.error else Status(StatusCode.UNSET),
            start_time=int((span.started_at + epoch) * 1e9),
            end_time=int((span.ended_at + epoch) * 1e9),
            instrumentation_scope=_SCOPE,
        )


class JsonLinesExporter(SpanExporter):
    """Appends each span to a file, as the SDK writes it in JSON. For tests, and for places without a collector."""

    def __init__(self, path: Path) -> None:
        """Raises OSError."""
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._is_torn = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """A line goes out in one write to the end of the file, so that processes may share it. Where only a part of one
        could be written (the disk is full), the next begins on a line of its own."""
        try:
            for span in spans:
                line = ("\n" * self._is_torn + span.to_json(indent=None) + "\n").encode()
                self._is_torn = os.write(self._file, line) < len(line)
        except OSError:
            return SpanExportResult.FAILURE
        return SpanExportResult.FAILURE if self._is_torn else SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        """Called once, after the last export."""
        os.close(self._file)


def _otlp_exporter(endpoint: str) -> SpanExporter:
    return OTLPSpanExporter(
        endpoint=endpoint, insecure=endpoint.startswith("http://"), headers=(), timeout=_EXPORT_TIMEOUT_S
    )


def _sdk_context(context: TraceContext, *, is_remote: bool) -> SpanContext:
    return SpanContext(
        int(context.trace_id, 16), int(context.span_id, 16), is_remote=is_remote, trace_flags=TraceFlags(1)
    )
