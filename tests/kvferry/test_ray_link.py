"""How Ray is joined, on a stand-in for its module."""

import socket
import sys
from types import ModuleType
from typing import Any

import pytest

from kvferry.launchers.ray_link import connect
from kvferry.launchers.ray_shapes import RayOptions
from runtime.child_process import LaunchError

NONE_HERE = ConnectionError("Could not find any running Ray instance. Please specify one.\nmore lines\nthe cause")


@pytest.fixture
def inits(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What `ray.init` was called with; it raises what `outcomes` of the module holds next."""
    calls: list[dict[str, Any]] = []
    ray = ModuleType("ray")
    ray.outcomes = []  # type: ignore[attr-defined]

    def init(**values: Any) -> None:
        calls.append(values)
        outcome = ray.outcomes.pop(0) if ray.outcomes else None
        if outcome is not None:
            raise outcome

    ray.init = init  # type: ignore[attr-defined]
    modules = {"ray": ray, "ray.util": ModuleType("ray.util")}
    modules["ray.util.scheduling_strategies"] = ModuleType("ray.util.scheduling_strategies")
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return calls


def _fails_with(*outcomes: BaseException | None) -> None:
    sys.modules["ray"].outcomes.extend(outcomes)  # type: ignore[attr-defined]


def test_without_ray_the_wheel_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(LaunchError, match=r"pip install 'kvferry\[ray\]'"):
        connect(RayOptions())


def test_where_no_ray_runs_one_is_started_only_by_who_may(inits: list[dict[str, Any]]) -> None:
    _fails_with(NONE_HERE)
    connect(RayOptions(), may_start=True)
    joined, started = inits
    assert joined["address"] == "auto"
    assert "address" not in started
    # A process in stock for each of its many CPUs would be the end of the machine.
    assert started["_system_config"] == {"prestart_worker_first_driver": False, "enable_worker_prestart": False}
    _fails_with(NONE_HERE)
    with pytest.raises(
        LaunchError, match=r"cannot join a Ray cluster at this host: Could not find.* the cause\. Start"
    ):
        connect(RayOptions())


@pytest.mark.parametrize(
    "error", [ConnectionError("Failed to connect to Ray cluster"), RuntimeError("no token"), SystemExit(15)]
)
def test_a_ray_that_is_there_and_cannot_be_joined_is_no_reason_to_start_another(
    inits: list[dict[str, Any]], error: BaseException
) -> None:
    _fails_with(error)
    with pytest.raises(LaunchError, match="see to its token"):
        connect(RayOptions(), may_start=True)
    assert len(inits) == 1


def test_an_address_where_nobody_listens_is_said_at_once(inits: list[dict[str, Any]]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as open_port:
        address = f"127.0.0.1:{open_port.getsockname()[1]}"
        connect(RayOptions(address=address), may_start=True)
    assert [call["address"] for call in inits] == [address]
    with pytest.raises(LaunchError, match=f"cannot join a Ray cluster at {address}: .*refused"):
        connect(RayOptions(address=address), may_start=True)
    assert len(inits) == 1
