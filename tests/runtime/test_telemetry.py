import json
import logging
import sys

import pytest
from prometheus_client import Counter

from runtime.telemetry import (
    JsonFormatter,
    PlainFormatter,
    new_registry,
    render_metrics,
    request_context,
    setup_logging,
)


def _record(message: str, *args: object, **extra: object) -> logging.LogRecord:
    return logging.getLogger("a.b").makeRecord(
        "a.b", logging.WARNING, __file__, 1, message, args, None, extra=dict(extra)
    )


def test_a_json_line_holds_the_message_and_the_request_id() -> None:
    with request_context("req-1"):
        line = JsonFormatter("decode-0").format(_record("moved %d blocks\nof text", 3))
    assert "\n" not in line
    fields = json.loads(line)
    assert fields["message"] == "moved 3 blocks\nof text"
    assert (fields["process"], fields["level"], fields["logger"]) == ("decode-0", "warning", "a.b")
    assert fields["request_id"] == "req-1"


def test_a_thread_passes_its_request_id_explicitly() -> None:
    fields = json.loads(JsonFormatter("p").format(_record("x", request_id="req-2")))
    assert fields["request_id"] == "req-2"


def test_outside_a_request_there_is_no_request_id() -> None:
    with request_context("req-1"):
        pass
    assert "request_id" not in json.loads(JsonFormatter("p").format(_record("x")))
    assert "[" not in PlainFormatter("p").format(_record("x"))


def test_a_json_line_has_the_fields_of_its_own_and_the_trace_of_its_request() -> None:
    with request_context("req-1", "ab" * 16):
        line = JsonFormatter("p").format(_record("x", fields={"status": 200, "path": "/\udcff", "message": "not this"}))
    fields = json.loads(line)
    assert (fields["status"], fields["path"], fields["message"]) == (200, "/?", "x")
    assert (fields["request_id"], fields["trace_id"]) == ("req-1", "ab" * 16)
    assert "trace_id" not in json.loads(JsonFormatter("p").format(_record("x")))


def test_plain_lines_name_process_logger_and_request() -> None:
    with request_context("req-1"):
        line = PlainFormatter("router").format(_record("hello"))
    assert line.endswith("WARNING router a.b [req-1] hello")


def test_an_exception_and_a_lone_surrogate_are_logged_not_lost() -> None:
    record = _record("bad name \udcff")
    try:
        raise ValueError("cause")
    except ValueError:
        record.exc_info = sys.exc_info()
    fields = json.loads(JsonFormatter("p").format(record))
    assert fields["message"].startswith("bad name ")
    assert "ValueError: cause" in fields["exception"]
    assert "ValueError: cause" in PlainFormatter("p").format(record)


def test_logs_go_to_standard_error_and_never_to_standard_output(capfd: pytest.CaptureFixture[str]) -> None:
    before = logging.getLogger().handlers[:], logging.getLogger().level
    try:
        setup_logging(level="warning", json_lines=True, process="p")
        logging.getLogger("x").warning("seen")
        logging.getLogger("x").info("not seen")
    finally:
        logging.getLogger().handlers[:], level = before
        logging.getLogger().setLevel(level)
    captured = capfd.readouterr()
    assert captured.out == ""
    assert [json.loads(line)["message"] for line in captured.err.splitlines()] == ["seen"]


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(ValueError, match="loud"):
        setup_logging(level="loud", json_lines=False, process="p")


def test_registries_are_separate_and_rendered_as_text() -> None:
    one, two = new_registry(), new_registry()
    Counter("kvferry_things", "Things.", registry=one).inc()
    body, content_type = render_metrics(one)
    assert b"kvferry_things_total 1.0" in body
    assert b"process_resident_memory_bytes" in body
    assert content_type.startswith("text/plain")
    assert b"kvferry_things" not in render_metrics(two)[0]
