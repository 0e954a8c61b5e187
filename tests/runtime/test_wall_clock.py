"""Nothing that waits, expires or is measured looks at the wall clock: a jump of it, either way, changes nothing.

Chaos cannot make such a jump (there is one wall clock for all namespaces), so the code is read instead.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = (
    "runtime", "kv_cache", "kv_transfer", "engine", "worker", "prefill_worker", "decode_worker", "router", "kvferry",
)  # fmt: skip
FUNCTIONS = {"time", "time_ns", "gmtime", "localtime", "ctime", "strftime", "now", "utcnow", "today", "clock_gettime"}
OF = {"time", "datetime", "date"}
# Each tells people or other systems when something was; none compares it with anything.
TELLS_THE_TIME = {
    "runtime/telemetry.py": "stamp of a log line",
    "runtime/span_writer.py": "start and end of spans",
    "router/text/chat_template.py": "`strftime_now` of chat templates",
    "router/http/protocol.py": "the header `date`",
    "router/http/generation.py": "the field `created`",
    "router/http/server.py": "the field `created` of a model",
    "router/http/debug_requests.py": "when requests came, for people",
    "kvferry/scaling/autoscaler.py": "stamp of a line of its record",
}


def wall_clock_reads(source: str) -> Iterator[int]:
    """The lines that read the wall clock, or import something that does."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module == "time":
            if {name.name for name in node.names} & FUNCTIONS:
                yield node.lineno
        elif isinstance(node, ast.Attribute) and node.attr in FUNCTIONS:
            owner = node.value
            if getattr(owner, "id", getattr(owner, "attr", "")) in OF:
                yield node.lineno


def test_only_what_tells_the_time_reads_the_wall_clock() -> None:
    found = {
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        if any(wall_clock_reads(path.read_text(encoding="utf-8")))
    }
    assert found <= set(TELLS_THE_TIME), f"{sorted(found - set(TELLS_THE_TIME))} read the wall clock: for what?"


@pytest.mark.parametrize(
    ("source", "reads"),
    [
        ("import time\ndeadline = time.time() + 5", True),
        ("from time import time", True),
        ("import datetime\ndatetime.datetime.now()", True),
        ("from datetime import datetime\ndatetime.now()", True),
        ("import time\ntime.monotonic()", False),
        ("from time import monotonic", False),
        ("clock.now()", False),
    ],
)
def test_the_reader_of_code_knows_a_wall_clock_when_it_sees_one(source: str, reads: bool) -> None:
    assert any(wall_clock_reads(source)) is reads
