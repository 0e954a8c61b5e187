from pathlib import Path
from typing import Any

import pytest

from kvferry.cluster_spec import ClusterSpec, RoleCommands

COMMANDS = RoleCommands(router=("r",), prefill=("p",), decode=("d",))


def _spec(**values: Any) -> ClusterSpec:
    return ClusterSpec(model_dir=Path("/m"), served_model_name="tiny", commands=COMMANDS, **values)


def test_a_worker_gets_the_flags_that_were_set_and_no_others() -> None:
    argv = _spec(num_blocks=64, transport="tcp").worker_argv("decode-1", Path("/s"), "127.0.0.1:9")
    assert argv[0] == "d"
    assert {
        "--model=/m",
        "--worker-id=decode-1",
        "--host=127.0.0.1",
        "--port=0",
        "--routers=127.0.0.1:9",
        "--cluster-secret-file=/s",
        "--num-blocks=64",
        "--transports=tcp",
        "--exit-on-stdin-close",
    } <= set(argv)
    others = ("--block-size", "--token-budget", "--max-num-seqs", "--served-model-name")
    assert not any(flag.startswith(others) for flag in argv)


def test_automatic_transport_leaves_the_choice_to_the_worker() -> None:
    argv = _spec().worker_argv("prefill-0", Path("/s"), "a:1")
    assert argv[0] == "p"
    assert not any(flag.startswith("--transports") for flag in argv)


def test_the_router_gets_its_host_and_ports_but_workers_stay_local() -> None:
    spec = _spec(host="0.0.0.0")
    argv = spec.router_argv(Path("/s"), {"http_port": 1, "grpc_port": 2, "internal_port": 3})
    assert argv[0] == "r"
    ports = {"--http-port=1", "--grpc-port=2", "--internal-port=3"}
    assert {"--host=0.0.0.0", "--internal-host=127.0.0.1", *ports} <= set(argv)
    assert "--host=127.0.0.1" in spec.worker_argv("decode-0", Path("/s"), "a:1")
    assert spec.local_host == "127.0.0.1"


def test_strict_hand_off_is_the_routers_business() -> None:
    spec = _spec(strict_handoff=True)
    assert "--strict-handoff" in spec.router_argv(Path("/s"), {})
    assert "--strict-handoff" not in spec.worker_argv("decode-0", Path("/s"), "a:1")
    assert "--strict-handoff" not in _spec().router_argv(Path("/s"), {})


def test_worker_ids_are_stable_and_start_at_zero() -> None:
    assert _spec(num_prefill=2, num_decode=1).worker_ids == ("prefill-0", "prefill-1", "decode-0")


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"num_decode": 0}, "--decode"),
        ({"num_prefill": -1}, "--prefill"),
        ({"num_decode": 65}, "64"),
        ({"transport": "pigeon"}, "pigeon"),
        ({"http_port": 70000}, "--http-port"),
        ({"grpc_port": -1}, "--grpc-port"),
        ({"http_port": 5, "grpc_port": 5}, "differ"),
        ({"start_timeout_s": 0.0}, "--start-timeout"),
        ({"drain_timeout_s": -1.0}, "--drain-timeout"),
    ],
)
def test_nonsense_is_refused_by_the_name_of_the_flag(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        _spec(**values).validate()
