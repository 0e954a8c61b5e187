"""Real processes: signals, the ready line and the end of standard input cannot be tested from inside."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

SERVICE = """
import asyncio, sys, time
from runtime.process import run_service, write_ready_line

async def main(shutdown):
    write_ready_line("sample", port=7)
    {body}

sys.exit(run_service(main, exit_on_stdin_close={watch}, orphan_grace_s={grace_s}))
"""
DRAINS = "await shutdown.wait(); sys.stderr.write('drained'); return 3"
HANGS_WHEN_DRAINING = "await shutdown.wait(); sys.stderr.write('draining'); sys.stderr.flush(); await asyncio.sleep(60)"
STUCK_LOOP = "time.sleep(60)"


@contextmanager
def service(body: str, *, watch: bool = False, grace_s: float = 60.0) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", SERVICE.format(body=body, watch=watch, grace_s=grace_s)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def _wait_ready(process: subprocess.Popen[str]) -> dict[str, object]:
    assert process.stdout is not None
    ready: dict[str, object] = json.loads(process.stdout.readline())
    return ready


def test_the_ready_line_is_one_json_object_with_the_pid() -> None:
    with service("return None") as process:
        assert _wait_ready(process) == {"ready": True, "role": "sample", "pid": process.pid, "port": 7}
        assert process.wait(20) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_drains_and_the_result_is_the_exit_status(number: signal.Signals) -> None:
    with service(DRAINS) as process:
        _wait_ready(process)
        process.send_signal(number)
        _, err = process.communicate(timeout=20)
        assert err == "drained"
        assert process.returncode == 3


def test_a_second_signal_ends_at_once() -> None:
    with service(HANGS_WHEN_DRAINING) as process:
        _wait_ready(process)
        process.send_signal(signal.SIGTERM)
        assert process.stderr is not None
        assert process.stderr.read(8) == "draining"
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 130


def test_the_end_of_standard_input_drains_when_it_is_watched() -> None:
    with service(DRAINS, watch=True) as process:
        _wait_ready(process)
        assert process.stdin is not None
        process.stdin.write("bytes on it are ignored")
        process.stdin.close()
        process.stdin = None
        _, err = process.communicate(timeout=20)
        assert err == "drained"
        assert process.returncode == 3


def test_the_end_of_standard_input_means_nothing_otherwise() -> None:
    with service(DRAINS) as process:
        _wait_ready(process)
        assert process.stdin is not None
        process.stdin.close()
        process.stdin = None
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.5)


@pytest.mark.parametrize("body", [HANGS_WHEN_DRAINING, STUCK_LOOP])
def test_an_orphan_that_cannot_drain_ends_anyway(body: str) -> None:
    with service(body, watch=True, grace_s=0.2) as process:
        _wait_ready(process)
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(20) == 70
        process.stdin = None


def test_a_defect_in_the_service_ends_it_with_a_traceback() -> None:
    with service("raise ValueError('defect')") as process:
        _, err = process.communicate(timeout=20)
        assert "ValueError: defect" in err
        assert process.returncode == 1
