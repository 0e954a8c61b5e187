import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

FAKE = Path(__file__).parents[1] / "support" / "fake_process.py"


@pytest.fixture(scope="session")
def fake_router() -> Iterator[str]:
    """gRPC address of a router with canned answers."""
    process = subprocess.Popen(
        [sys.executable, str(FAKE), "router", "good"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    try:
        lines = iter(process.stdout.readline, "")
        ready = next(json.loads(line) for line in lines if line.startswith("{"))
        yield f"127.0.0.1:{ready['grpc_port']}"
    finally:
        process.kill()
        process.communicate()
