"""`kvferry up` and `kvferry demo` as real processes, with fakes for the router and the workers."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvferry.run_dir import live_state, process_start_ticks

FAKE_CLUSTER = str(Path(__file__).parents[1] / "support" / "fake_cluster.py")


def _command(root: Path, behaviours: str, *argv: str) -> list[str]:
    return [sys.executable, FAKE_CLUSTER, *behaviours.split(), *argv, "--json", "--cache-dir", str(root)]


def _up(root: Path, behaviours: str, *flags: str) -> list[str]:
    ports = ("--http-port", "0", "--grpc-port", "0", "--state-dir", str(root / "state"))
    return _command(root, behaviours, "up", "--model", "tiny", *ports, *flags)


@contextmanager
def running(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def _until(process: subprocess.Popen[str], kind: str) -> list[dict[str, Any]]:
    """The events so far, up to the first one of `kind`."""
    assert process.stdout is not None
    events: list[dict[str, Any]] = []
    for line in process.stdout:
        events.append(json.loads(line))
        if events[-1]["event"] == kind:
            return events
    raise AssertionError(f"ended with {process.wait()} before {kind}: {events}")


def _wait_all_gone(pids: list[int], timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while any(process_start_ticks(pid) is not None for pid in pids):
        assert time.monotonic() < deadline, "processes were left behind"
        time.sleep(0.02)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_up_prepares_starts_reports_and_drains_on_a_signal(tmp_path: Path, number: signal.Signals) -> None:
    with running(_up(tmp_path, "good good good", "--decode", "2", "--num-blocks", "64")) as process:
        events = _until(process, "serving")
        assert [event["event"] for event in events[:2]] == ["progress", "progress"]
        ready = {event["name"]: event for event in events if event["event"] == "ready"}
        assert set(ready) == {"router", "prefill-0", "decode-0", "decode-1"}
        assert f"--model={tmp_path / 'tiny'}" in ready["decode-0"]["details"]["flags"]
        assert "--num-blocks=64" in ready["decode-0"]["details"]["flags"]
        assert "64 blocks" in ready["decode-0"]["text"]
        assert "transports shm, tcp" in ready["decode-0"]["text"]
        state = live_state(tmp_path / "state")
        assert state is not None
        assert state["grpc_address"] == events[-1]["grpc_address"]
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
        assert (process.returncode, err) == (0, "")
        _wait_all_gone(list(events[-1]["pids"].values()), timeout_s=0.0)
        assert live_state(tmp_path / "state") is None


def test_down_drains_and_waits_until_all_is_gone(tmp_path: Path) -> None:
    with running(_up(tmp_path, "good good good")) as process:
        pids = list(_until(process, "serving")[-1]["pids"].values())
        down = [sys.executable, "-m", "kvferry", "down", "--state-dir", str(tmp_path / "state")]
        done = subprocess.run(down, capture_output=True, text=True, timeout=100, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        assert process.wait(timeout=60) == 0
        _wait_all_gone(pids, timeout_s=0.0)
        again = subprocess.run(down, capture_output=True, text=True, timeout=100, check=False)
        assert again.returncode == 1
        assert "no running cluster" in again.stderr


def test_when_the_launcher_is_killed_its_processes_end_by_themselves(tmp_path: Path) -> None:
    with running(_up(tmp_path, "good good good")) as process:
        pids = list(_until(process, "serving")[-1]["pids"].values())
        process.kill()
        process.wait()
        _wait_all_gone(pids)
        assert live_state(tmp_path / "state") is None


def test_a_second_signal_kills_what_is_still_draining(tmp_path: Path) -> None:
    with running(_up(tmp_path, "good ignores-sigterm good")) as process:
        pids = list(_until(process, "serving")[-1]["pids"].values())
        process.send_signal(signal.SIGINT)
        _until(process, "stopping")
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 130
        _wait_all_gone(pids, timeout_s=0.0)


def test_a_signal_while_starting_leaves_nothing(tmp_path: Path) -> None:
    with running(_up(tmp_path, "good hangs good")) as process:
        events = _until(process, "ready")
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=60)
        assert process.returncode == 130
        later = [json.loads(line) for line in out.splitlines()]
        pids = [event["details"]["pid"] for event in [*events, *later] if event["event"] == "ready"]
        assert pids
        _wait_all_gone(pids, timeout_s=0.0)


def test_a_start_that_fails_ends_with_1_and_the_log(tmp_path: Path) -> None:
    done = subprocess.run(
        _up(tmp_path, "good good dies-at-start"), capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 1
    error = json.loads(done.stdout.splitlines()[-1])["error"]
    assert "decode-0 exited with status 3" in error["message"]
    assert "no memory for the pool" in error["message"]
    assert "decode-0 exited" in done.stderr


def test_a_model_that_is_not_there_is_said_before_anything_starts(tmp_path: Path) -> None:
    command = _command(tmp_path, "good good good", "up", "--model", "missing")
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 1
    assert "there is no model 'missing'" in done.stderr
    assert "ready" not in done.stdout


@pytest.mark.parametrize("flags", [("--decode", "0"), ("--http-port", "99999")])
def test_bad_numbers_are_refused_before_the_model_is_prepared(tmp_path: Path, flags: tuple[str, ...]) -> None:
    done = subprocess.run(
        [*_command(tmp_path, "good good good", "up", "--model", "tiny"), *flags],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 2
    assert flags[0] in done.stderr
    assert "progress" not in done.stdout


def test_a_router_that_dies_for_good_ends_the_cluster_with_1(tmp_path: Path) -> None:
    with running(_up(tmp_path, "good good good", "--no-restart")) as process:
        pids = _until(process, "serving")[-1]["pids"]
        os.kill(pids["router"], signal.SIGKILL)
        assert process.wait(timeout=60) == 1
        _wait_all_gone(list(pids.values()), timeout_s=0.0)


def test_the_demo_streams_an_answer_proves_it_and_leaves_no_process(tmp_path: Path) -> None:
    command = [sys.executable, FAKE_CLUSTER, "good", "good", "good", "demo", "--cache-dir", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "Why is the sky blue?" in done.stdout
    assert "tokens_recomputed      0" in done.stdout
    pids = [int(line.partition("pid ")[2].partition(",")[0]) for line in done.stdout.splitlines() if "pid " in line]
    assert len(pids) == 3
    _wait_all_gone(pids, timeout_s=0.0)


def test_a_demo_whose_receipt_proves_nothing_fails(tmp_path: Path) -> None:
    command = _command(tmp_path, "good good good", "demo", "--prompt", "please recompute this")
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 1
    assert "9 prompt tokens were computed again" in done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["problems"]
