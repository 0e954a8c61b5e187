"""Real clusters that several tests share. One for those that leave it as they found it; one whose processes may be
killed, since they come back; one whose workers have only TCP between them. `tests/conftest.py` says which files share
them."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.live_cluster import LiveCluster, live_cluster

MORTALS = {"prefill-0", "prefill-1", "decode-0", "decode-1"}


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


@pytest.fixture(scope="session")
def restarting_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    """Router, two prefill and two decode workers. The launcher starts again what dies."""
    flags = ("--prefill", "2", "--decode", "2", "--num-blocks", "512")
    with live_cluster(tmp_path_factory.mktemp("restarting"), *flags) as cluster:
        yield cluster


@pytest.fixture
def mortal(restarting_cluster: LiveCluster) -> Iterator[LiveCluster]:
    """The restarting cluster with all its workers; afterwards nothing may be held anywhere."""
    cluster = restarting_cluster
    cluster.wait_until(lambda state: {w.worker_id for w in state.workers if w.state == "ready"} == MORTALS)
    yield cluster
    cluster.wait_until(lambda state: len(state.workers) == len(MORTALS))
    cluster.wait_at_rest()


@pytest.fixture(scope="session")
def tcp_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    """Router, one prefill and one decode worker that require shared memory and have only TCP. Tests may not kill
    anything in it."""
    flags = ("--num-blocks", "1024", "--no-restart")
    flags += ("--forbid-transports", "shm,nixl,ucx", "--require-transport", "shm")
    with live_cluster(tmp_path_factory.mktemp("tcp"), *flags) as cluster:
        yield cluster
