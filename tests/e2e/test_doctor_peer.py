"""`kvferry doctor --listen` and `kvferry doctor --peer` as two real processes on the loopback address."""

import json
import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from kv_transfer.end_facts import importable_transports
from kvferry.__main__ import main
from runtime.secret import create_secret_file
from tests.support.listening import LOOPBACK, listening
from tests.support.pickled import Bomb

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]
DOCTOR = (sys.executable, "-m", "kvferry", "doctor", "--json")


@pytest.fixture
def secret_file(tmp_path: Path) -> Path:
    create_secret_file(tmp_path / "secret")
    return tmp_path / "secret"


@contextmanager
def _listening(secret_file: Path, *flags: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    command = [*DOCTOR, "--listen", "127.0.0.1:0", "--cluster-secret-file", str(secret_file), *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process, json.loads(process.stdout.readline())
    finally:
        process.kill()
        process.communicate()


def _ask(address: str, secret_file: Path, *flags: str) -> "subprocess.CompletedProcess[str]":
    command = [*DOCTOR, "--peer", address, "--cluster-secret-file", str(secret_file), *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


def test_two_processes_measure_their_transports_and_the_listener_ends_on_a_signal(
    secret_file: Path, tmp_path: Path
) -> None:
    create_secret_file(tmp_path / "other")
    with _listening(secret_file, "--transports", "shm,tcp") as (listener, ready):
        assert ready["event"] == "listening"
        done = _ask(ready["address"], secret_file, "--transports", "shm,tcp")
        assert done.returncode == 0, done.stderr
        report = json.loads(done.stdout)
        assert report["ok"]
        assert [(trial["transport"], trial["works"]) for trial in report["trials"]] == [("shm", True), ("tcp", True)]
        assert all(trial["gigabytes_per_s"] > 0 and trial["fixed_ms"] > 0 for trial in report["trials"])
        assert (report["chosen"], report["expected"], report["warning"]) == ("shm", "shm", "")
        # One with another secret, and a second peer, with less.
        done = _ask(ready["address"], tmp_path / "other", "--transports", "tcp")
        assert done.returncode == 1
        assert json.loads(done.stdout)["error"]["code"] == "unauthenticated"
        report = json.loads(_ask(ready["address"], secret_file, "--transports", "tcp").stdout)
        assert (report["chosen"], report["expected"]) == ("tcp", "tcp")
        listener.send_signal(signal.SIGINT)
        assert listener.wait(60) == 0
    done = _ask(ready["address"], secret_file, "--transports", "tcp")
    assert done.returncode == 1
    assert json.loads(done.stdout)["error"]["code"] == "unavailable"


def test_every_transport_installed_here_works_and_pickles_at_every_port_of_the_listener_do_nothing(
    secret_file: Path, tmp_path: Path
) -> None:
    installed = set(importable_transports())
    trap = tmp_path / "trap"
    bomb = pickle.dumps(Bomb(trap))
    with _listening(secret_file) as (listener, ready):
        assert set(ready["transports"]) == installed
        done = _ask(ready["address"], secret_file)
        assert done.returncode == 0, done.stderr
        report = json.loads(done.stdout)
        assert {trial["transport"]: trial["failure"] for trial in report["trials"]} == dict.fromkeys(installed, "")
        assert (report["chosen"], report["warning"]) == ("shm", "")
        ports = listening(listener.pid)
        assert len(ports) >= 2, "one to ask at, and one for KV links"
        for address, port in ports:
            assert address in LOOPBACK
            for prefix in (b"", len(bomb).to_bytes(4, "big"), b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"):
                with socket.create_connection(("127.0.0.1", port), timeout=10) as stranger, suppress(OSError):
                    stranger.sendall(prefix + bomb)
                    stranger.shutdown(socket.SHUT_WR)
        assert _ask(ready["address"], secret_file).returncode == 0
        assert not trap.exists()


def test_nothing_in_common_ends_with_one_and_says_so(secret_file: Path) -> None:
    with _listening(secret_file, "--transports", "shm") as (_, ready):
        done = _ask(ready["address"], secret_file, "--transports", "tcp")
    assert done.returncode == 1
    assert "WARNING: no transport works" in done.stderr
    assert not json.loads(done.stdout)["ok"]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--listen", "0.0.0.0"], "wildcard"),
        (["--peer", "host:port"], "HOST[:PORT]"),
        (["--peer", "127.0.0.1", "--transports", "pigeon"], "pigeon"),
    ],
)
def test_nonsense_ends_with_two(
    flags: list[str], said: str, secret_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*DOCTOR[3:], *flags, "--cluster-secret-file", str(secret_file)]) == 2
    assert said in capsys.readouterr().err


def test_without_a_secret_there_is_no_other_end(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*DOCTOR[3:], "--peer", "127.0.0.1"]) == 2
    assert "--cluster-secret-file" in capsys.readouterr().err
