"""A short run of chaos. The long one is `make chaos`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.chaos.world import why_not

pytestmark = [pytest.mark.e2e, pytest.mark.chaos, pytest.mark.timeout(400)]
SEED = 459


def test_under_a_few_faults_no_text_is_wrong_and_nothing_hangs_or_is_left(tmp_path: Path) -> None:
    if reason := why_not():
        pytest.skip(reason)
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "tests.chaos.run", "--pace", "short", "--seed", str(SEED), "--steps", "3"]
    done = subprocess.run([*command, "--json", str(report)], capture_output=True, text=True, timeout=380, check=False)
    assert done.returncode == 0, done.stderr
    facts = json.loads(report.read_text())
    assert facts["violations"] == []
    assert facts["requests"]["good"] > 0
    assert facts["faults"] >= 3
