"""One small real cluster for the tests that leave it as they found it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.live_cluster import LiveCluster, live_cluster


@pytest.fixture(scope="session")
def shared_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    """Router, one prefill and two decode workers on tiny-real. Tests may not kill anything in it."""
    directory: Path = tmp_path_factory.mktemp("cluster")
    flags = ["--decode", "2", "--num-blocks", "512", "--no-restart"]
    flags += ["--access-log", "--log-json", "--trace-file", str(directory / "spans")]
    with live_cluster(directory, *flags) as cluster:
        yield cluster


@pytest.fixture
def cluster(shared_cluster: LiveCluster) -> Iterator[LiveCluster]:
    """The shared cluster; after the test it must come to rest with nothing leaked."""
    yield shared_cluster
    shared_cluster.wait_at_rest()
