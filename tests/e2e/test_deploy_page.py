"""The section "Laptop" of docs/deploy.md, typed word for word. Those of Ray are typed by `test_ray.py`."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvferry.run_dir import live_state
from tests.support.deploy_page import page_command, page_commands
from tests.support.live_cluster import LiveCluster, live_cluster

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]
SECTION = "Laptop"


def _typed(words: Sequence[str], cluster: LiveCluster) -> str:
    """What it prints; it must end well. Only where the cluster is is added."""
    command = [sys.executable, "-m", "kvferry", *words, "--state-dir", str(cluster.state_dir)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
    return done.stdout


def test_a_cluster_is_started_looked_at_scaled_and_ended_as_the_page_says(tmp_path: Path) -> None:
    assert [words[1] for words in page_commands(SECTION)] == ["up", "status", "scale", "down"]
    with live_cluster(tmp_path, *page_command(SECTION, "up")[1:]) as cluster:
        shown = _typed(page_command(SECTION, "status"), cluster)
        assert [name for name in ("prefill-0", "decode-0", "decode-1") if name not in shown] == []
        scale = page_command(SECTION, "scale")
        _typed(scale, cluster)
        roles = [worker.role for worker in cluster.state().workers]
        assert roles.count("decode") == int(scale[scale.index("--decode") + 1])
        _typed(page_command(SECTION, "down"), cluster)
        assert cluster.launcher.wait(timeout=60) == 0
        assert live_state(cluster.state_dir) is None
