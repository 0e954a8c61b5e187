from pathlib import Path
from typing import Any

import pytest

from decode_worker.config import DecodeConfig
from kvferry.cluster_spec import ClusterSpec, RoleCommands
from kvferry.commands.routing import ROUTER_FLAGS
from prefill_worker.config import PrefillConfig
from router.config import RouterConfig
from runtime.config import parse_config

COMMANDS = RoleCommands(router=("r",), prefill=("p",), decode=("d",))


def _spec(**values: Any) -> ClusterSpec:
    return ClusterSpec(model_dir=Path("/m"), served_model_name="tiny", commands=COMMANDS, **values)


def test_a_worker_gets_the_flags_that_were_set_and_no_others() -> None:
    argv = _spec(num_blocks=64, transports=("tcp",)).worker_argv("decode-1", Path("/s"), "127.0.0.1:9")
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


def test_each_role_gets_its_own_block_size_and_what_the_other_role_would_need() -> None:
    spec = _spec(
        block_size=32, decode_block_size=64, kv_wire_dtype="int8", max_backlog_mb=8, lease_s=3.5, speculative_tokens=5
    )
    prefill = set(spec.worker_argv("prefill-0", Path("/s"), "a:1"))
    decode = set(spec.worker_argv("decode-0", Path("/s"), "a:1"))
    both = {"--max-backlog-mb=8", "--lease-s=3.5", "--kv-wire-dtype=int8", "--speculative-tokens=5"}
    assert {"--block-size=32", *both} <= prefill
    assert {"--block-size=64", *both} <= decode


def test_transports_allowed_and_forbidden_reach_the_workers() -> None:
    spec = _spec(transports=("ucx", "tcp"), forbid_transports=("shm",))
    for worker_id in ("prefill-0", "decode-0"):
        assert {"--transports=ucx,tcp", "--forbid-transports=shm"} <= set(
            spec.worker_argv(worker_id, Path("/s"), "a:1")
        )


@pytest.mark.parametrize(("worker_id", "config"), [("prefill-0", PrefillConfig), ("decode-0", DecodeConfig)])
def test_a_worker_understands_every_flag_it_is_given(worker_id: str, config: Any) -> None:
    spec = _spec(
        transports=("tcp",), forbid_transports=("shm",), kv_wire_dtype="int8", max_backlog_mb=8, lease_s=3.5,
        prefill_block_size=8, decode_block_size=8, num_blocks=9, token_budget=64, max_num_seqs=2, speculative_tokens=3,
        tensor_parallel=2, kv_cache_dtype="int8",
    )  # fmt: skip
    parsed = parse_config(config, list(spec.worker_argv(worker_id, Path("/s"), "a:1")[1:]))
    assert parsed.transports == ("tcp",)
    assert parsed.block_size == 8
    assert parsed.tensor_parallel == 2
    assert parsed.kv_cache_dtype == "int8"


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


@pytest.mark.parametrize(("reuse", "said"), [(True, "--reuse-decode-kv"), (False, "--no-reuse-decode-kv")])
def test_what_the_router_must_insist_on_and_may_reuse_is_passed_to_it_alone(reuse: bool, said: str) -> None:
    spec = _spec(require_transport=("shm", "tcp"), reuse_decode_kv=reuse)
    spec.validate()
    argv = spec.router_argv(Path("/s"), {})
    assert {"--require-transport=shm,tcp", said} <= set(argv)
    assert not any("require-transport" in flag for flag in spec.worker_argv("prefill-0", Path("/s"), "a:1"))
    silent = " ".join(_spec().router_argv(Path("/s"), {}))
    assert "require-transport" not in silent
    assert "reuse-decode-kv" not in silent


def test_the_routers_own_flags_reach_the_router_which_understands_them_all() -> None:
    given = {
        "router_processes": 3, "process_port": 9100, "tool_parser": "hermes", "reasoning_parser": "think",
        "kv_forecast_tokens": 64, "slo_interactive_ttft_s": 0.5, "slo_interactive_tpot_s": 0.05,
        "slo_batch_ttft_s": 60.0, "slo_batch_tpot_s": 0.5,
    }  # fmt: skip
    spec = _spec(router=given)
    spec.validate()
    assert set(given) == set(ROUTER_FLAGS)
    parsed = parse_config(RouterConfig, list(spec.router_argv(Path("/s"), {})[1:]))
    assert {name: getattr(parsed, name) for name in given} == given
    assert not any(flag.startswith("--tool-parser") for flag in _spec().router_argv(Path("/s"), {}))
    assert spec.num_routers == 3
    assert _spec().num_routers == 1


def test_worker_ids_are_stable_and_start_at_zero() -> None:
    assert _spec(num_prefill=2, num_decode=1).worker_ids == ("prefill-0", "prefill-1", "decode-0")


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"num_decode": 0}, "--decode"),
        ({"num_prefill": -1}, "--prefill"),
        ({"num_decode": 65}, "64"),
        ({"transports": ("pigeon",)}, "pigeon"),
        ({"transports": ("tcp",), "forbid_transports": ("tcp",)}, "--forbid-transports"),
        ({"require_transport": ("pigeon",)}, "--require-transport"),
        ({"block_size": 12}, "--block-size"),
        ({"speculative_tokens": 65}, "--speculative-tokens"),
        ({"tensor_parallel": 65}, "--tensor-parallel"),
        ({"prefill_block_size": 12}, "--prefill-block-size"),
        ({"decode_block_size": 256}, "--decode-block-size"),
        ({"max_backlog_mb": 0}, "--max-backlog-mb"),
        ({"lease_s": 0.0}, "--lease-s"),
        ({"router": {"router_processes": 33}}, "--router-processes"),
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


def test_traces_and_json_logs_are_for_all_and_the_access_log_is_the_routers() -> None:
    spec = _spec(trace_file=Path("/spans"), otlp_endpoint="http://127.0.0.1:4317", log_json=True, access_log=True)
    router = set(spec.router_argv(Path("/s"), {"http_port": 0, "grpc_port": 0, "internal_port": 0}))
    worker = set(spec.worker_argv("decode-0", Path("/s"), "a:1"))
    assert {"--trace-file=/spans", "--otlp-endpoint=http://127.0.0.1:4317", "--log-json"} <= router & worker
    assert "--access-log" in router - worker
    with pytest.raises(ValueError, match="--otlp-endpoint"):
        _spec(otlp_endpoint="127.0.0.1:4317").validate()
