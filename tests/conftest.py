"""What holds for the whole suite."""

from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling

# Files of `tests/e2e` that share a cluster: two processes that had a part of them each would both start one.
SHARING = {
    "shared_cluster": (
        *("front_door_counts", "front_door_leaving", "front_door_ports", "grpc_api", "observability", "openai_api"),
        *("parity", "second_turn", "tensor_parallel", "transports"),
    ),
    "restarting_cluster": ("front_door_losses", "losses", "ui"),
    "tcp_cluster": ("strict_handoff", "workers_under_load"),
}
# Each test in them has its own cluster.
ALONE = ("same_text", "workers_stopped")


class FilesAndClusters(LoadFileScheduling):
    """`--dist loadfile`, with those files taken together, and those taken apart."""

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.partition("::")[0]
        name = path.rpartition("/")[2].removeprefix("test_").removesuffix(".py")
        if "e2e" not in path:
            return path
        if name in ALONE:
            return nodeid
        return next((cluster for cluster, files in SHARING.items() if name in files), path)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling | None:
    return FilesAndClusters(config, log) if config.getoption("dist") == "loadfile" else None


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """`-m NAME` need not import the files that do not even mention NAME: most of them, in seconds."""
    marker: str = config.getoption("markexpr")
    if marker.isidentifier() and collection_path.name.startswith("test_"):
        return f"mark.{marker}" not in collection_path.read_text(encoding="utf-8") or None
    return None


def pytest_addoption(parser: pytest.Parser) -> None:
    """For `tests/deploy`. Here, because pytest takes options from the uppermost conftest alone."""
    parser.addoption(
        "--crd-schemas",
        metavar="DIR",
        default=None,
        help="definitions of custom resources, in .yaml files (../shared/schemas)",
    )
