"""Logs (plain or JSON lines, each with its request id) and the helpers around a Prometheus registry.

Logs go to standard error: standard output belongs to the ready line, which a launcher reads.
"""

import logging
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime

import orjson
from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

LOG_LEVELS = ("debug", "info", "warning", "error")

# Seconds; from a cached token on a small model to a long prompt on a busy machine.
LATENCY_BUCKETS_S = (0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)

FIELDS = "fields"
"""`extra={FIELDS: {...}}` of a log call: facts that JSON lines have as fields of their own."""

_request_id: ContextVar[str] = ContextVar("request_id", default="")
_trace_id: ContextVar[str] = ContextVar("trace_id", default="")


def setup_logging(*, level: str, json_lines: bool, process: str) -> None:
    """Send all logs of this process to standard error, replacing what was set up before.

    `process` names it in every line, such as `decode-0`. `level` is one of LOG_LEVELS (ValueError otherwise).
    Main thread, once, before other threads log.
    """
    if level not in LOG_LEVELS:
        raise ValueError(f"log level must be one of {', '.join(LOG_LEVELS)}, not {level!r}")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(process) if json_lines else PlainFormatter(process))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


@contextmanager
def request_context(request_id: str, trace_id: str = "") -> Iterator[None]:
    """Log lines of this task (and tasks that it starts) within the block carry `request_id`, JSON lines `trace_id` too.

    Threads have no such context: they pass `extra={"request_id": ...}` to the log call instead.
    """
    request, trace = _request_id.set(request_id), _trace_id.set(trace_id)
    try:
        yield
    finally:
        _request_id.reset(request)
        _trace_id.reset(trace)


class PlainFormatter(logging.Formatter):
    """`2026-11-29T10:00:00.123Z INFO decode-0 runtime.membership [request id] message`."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        request_id = _request_id_of(record)
        mark = f" [{request_id}]" if request_id else ""
        line = f"{_time_of(record)} {record.levelname} {self._process} {record.name}{mark} {record.getMessage()}"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, process, logger, message; if there are any: request_id, trace_id, exception,
    and the fields of the line's own."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        fields = {
            **record.__dict__.get(FIELDS, {}),
            "time": _time_of(record),
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if request_id := _request_id_of(record):
            fields["request_id"] = request_id
        if trace_id := str(record.__dict__.get("trace_id") or _trace_id.get()):
            fields["trace_id"] = trace_id
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        # A lone surrogate (from a file name, say) is not valid UTF-8 and must not cost the log line.
        clean = {key: _clean(value) if isinstance(value, str) else value for key, value in fields.items()}
        return orjson.dumps(clean).decode()


def _clean(text: str) -> str:
    return text.encode("utf-8", "replace").decode()


def describe_defect(error: BaseException) -> str:
    """An exception that nobody foresaw, by type and place, for a log line: what it says may quote a prompt."""
    return f"{type(error).__name__}\n{''.join(traceback.format_tb(error.__traceback__))}"


def new_registry() -> CollectorRegistry:
    """A registry of its own (no module-level state), with the memory, CPU and file counts of this process."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    return registry


def render_metrics(registry: CollectorRegistry) -> tuple[bytes, str]:
    """Body and content type of a `/metrics` answer."""
    return generate_latest(registry), CONTENT_TYPE_LATEST


def _request_id_of(record: logging.LogRecord) -> str:
    explicit = record.__dict__.get("request_id", "")
    return str(explicit) if explicit else _request_id.get()


def _time_of(record: logging.LogRecord) -> str:
    stamp = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
    return stamp.replace("+00:00", "Z")
