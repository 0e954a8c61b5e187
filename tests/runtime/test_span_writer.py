"""Spans on their way through OpenTelemetry's SDK: into a file, and to a collector."""

import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from runtime.clock import SystemClock
from runtime.tracing import Span, TraceContext, Tracer, TracingOptions, open_tracer

ROOT_DIR = Path(__file__).parents[2]
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
ROOT, CHILD = TraceContext(TRACE, "1" * 16), TraceContext(TRACE, "2" * 16)


def spans(clock: SystemClock) -> list[Span]:
    now = clock.now()
    return [
        Span("request", ROOT, "3" * 16, now - 2.0, now, {"kvferry.tenant": "red"}, "unavailable", is_server=True),
        Span("queue", CHILD, ROOT.span_id, now - 2.0, now - 1.0, {"kvferry.bytes": 7, "kvferry.share": 0.5}),
    ]


def tracer(options: TracingOptions, process: str = "router") -> Tracer:
    opened = open_tracer(options, process, SystemClock())
    assert opened is not None
    return opened


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_file_gets_one_object_a_line_when_the_tracer_closes_at_the_latest(tmp_path: Path) -> None:
    path = tmp_path / "spans"
    writer = tracer(TracingOptions(trace_file=path))
    writer.emit(spans(SystemClock()))
    writer.close()
    writer.close()
    request, queue = lines(path)
    assert (request["name"], queue["name"]) == ("request", "queue")
    assert request["context"]["trace_id"] == queue["context"]["trace_id"] == f"0x{TRACE}"
    assert request["parent_id"] == f"0x{'3' * 16}"
    assert queue["parent_id"] == request["context"]["span_id"]
    assert request["status"] == {"status_code": "ERROR", "description": "unavailable"}
    assert queue["status"]["status_code"] == "UNSET"
    assert queue["attributes"] == {"kvferry.bytes": 7, "kvferry.share": 0.5}
    assert request["resource"]["attributes"]["service.instance.id"] == "router"
    # The monotonic clock of the process was turned into the time of day.
    assert request["start_time"][:4] == time.strftime("%Y", time.gmtime(time.time() - 2))


def test_processes_may_share_the_file(tmp_path: Path) -> None:
    path = tmp_path / "spans"
    writers = [tracer(TracingOptions(trace_file=path), name) for name in ("router", "decode-0")]
    for writer in writers:
        writer.emit(spans(SystemClock()) * 50)
    for writer in writers:
        writer.close()
    assert len(lines(path)) == 200


_WRITER = """
import sys
from pathlib import Path

from runtime.clock import SystemClock
from runtime.tracing import Span, TraceContext, TracingOptions, open_tracer

clock = SystemClock()
tracer = open_tracer(TracingOptions(trace_file=Path(sys.argv[1])), sys.argv[2], clock)
sys.stdin.readline()
for number in range(1, 301):
    trace = TraceContext(f"{number:032x}", f"{number:016x}")
    tracer.emit([Span("request", trace, "", 0.0, clock.now(), {"kvferry.filling": sys.argv[2] * 3000})])
tracer.close()
"""


def test_lines_of_processes_that_write_at_the_same_time_are_whole(tmp_path: Path) -> None:
    path = tmp_path / "spans"
    command = [sys.executable, "-c", _WRITER, str(path)]
    writers = [subprocess.Popen([*command, name], stdin=subprocess.PIPE, cwd=ROOT_DIR) for name in "ab"]
    for writer in writers:
        assert writer.stdin is not None
        writer.stdin.write(b"\n")
        writer.stdin.close()
    assert [writer.wait(60) for writer in writers] == [0, 0]
    fillings = [line["attributes"]["kvferry.filling"] for line in lines(path)]
    assert sorted(fillings) == ["a" * 3000] * 300 + ["b" * 3000] * 300


def test_behind_a_line_that_the_disk_had_no_room_for_the_next_one_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, write, room = tmp_path / "spans", os.write, [10]

    def short(file: int, data: bytes) -> int:
        return write(file, data[: room.pop()] if room else data)

    monkeypatch.setattr(os, "write", short)
    writer = tracer(TracingOptions(trace_file=path))
    writer.emit(spans(SystemClock()))
    writer.close()
    torn, whole = path.read_text().splitlines()
    assert len(torn) == 10
    assert json.loads(whole)["name"] == "queue"


def test_a_file_that_cannot_be_written_is_said_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        open_tracer(TracingOptions(trace_file=tmp_path / "none" / "spans"), "router", SystemClock())


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self) -> None:
        self.requests: list[Any] = []

    def Export(self, request: Any, context: Any) -> Any:
        self.requests.append(request)
        return trace_service_pb2.ExportTraceServiceResponse()


def test_a_collector_gets_them_over_otlp_whatever_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "service.name=another")
    collector, server = Collector(), grpc.server(ThreadPoolExecutor(1))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        writer = tracer(TracingOptions(otlp_endpoint=f"http://127.0.0.1:{port}"), "decode-0")
        writer.emit(spans(SystemClock()))
        writer.close()
    finally:
        server.stop(None)
    resource = collector.requests[0].resource_spans[0]
    sent = resource.scope_spans[0].spans
    assert [span.name for span in sent] == ["request", "queue"]
    assert sent[0].trace_id.hex() == TRACE
    names = {entry.key: entry.value.string_value for entry in resource.resource.attributes}
    assert names == {"service.name": "kvferry", "service.instance.id": "decode-0"}
