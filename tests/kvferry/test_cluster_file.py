"""`kvferry up --config cluster.yaml`: keys of `up` at the top, sections for its processes, flags over both."""

import argparse
from pathlib import Path
from typing import Any

import pytest

from kvferry.__main__ import build_parser, main
from kvferry.cluster_file import SECTIONS, cluster_yaml, section_options, settle
from kvferry.cluster_spec import ClusterSpec, RoleCommands
from kvferry.commands.up_flags import spec_of
from router.config import RouterConfig
from runtime.config import parse_config

EVERYTHING = """
model: m
prefill_workers: 2
decode_workers: 3
drain_timeout_s: 5
restart: false
log_level: warning
transports: [tcp]
num_blocks: 64
cache_dir: cache
router:
  http_port: 0
  max_in_flight: 7
  require_transport: [tcp]
  log_level: error
prefill:
  token_budget: 512
  force_transport: tcp
decode:
  num_blocks: 128
  speculative_tokens: 4
  log_json: true
"""


def _settled(tmp_path: Path, text: str, *flags: str) -> argparse.Namespace:
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    return settle(build_parser().parse_args(["up", f"--config={path}", *flags]))


def _spec(arguments: argparse.Namespace) -> ClusterSpec:
    spec = spec_of(arguments, RoleCommands(("r",), ("p",), ("d",)), Path("/m"), "m")
    spec.validate()
    return spec


def test_the_file_describes_a_cluster_and_each_process_gets_its_part(tmp_path: Path) -> None:
    arguments = _settled(tmp_path, EVERYTHING)
    spec = _spec(arguments)
    assert (spec.num_prefill, spec.num_decode, spec.restart, spec.drain_timeout_s) == (2, 3, False, 5.0)
    assert (spec.http_port, spec.grpc_port) == (0, 8001)
    assert arguments.cache_dir == Path("cache").absolute()
    router = set(spec.router_argv(Path("/s"), {}))
    assert {"--max-in-flight=7", "--require-transport=tcp", "--log-level=error"} <= router
    prefill = set(spec.worker_argv("prefill-1", Path("/s"), "a:1"))
    assert {"--token-budget=512", "--force-transport=tcp", "--num-blocks=64", "--log-level=warning"} <= prefill
    decode = set(spec.worker_argv("decode-0", Path("/s"), "a:1"))
    assert {"--num-blocks=128", "--speculative-tokens=4", "--log-json", "--transports=tcp"} <= decode
    assert "--log-json" not in prefill | router
    assert not any(flag.startswith("--token-budget") for flag in decode)
    parsed = parse_config(RouterConfig, [*spec.router_argv(Path("/s"), {})[1:]])
    assert (parsed.max_in_flight, parsed.require_transport) == (7, ("tcp",))


def test_a_flag_goes_over_its_key_wherever_the_file_has_it(tmp_path: Path) -> None:
    flags = ("--num-blocks=32", "--http-port=9000", "--decode=1", "--log-level=debug", "--restart")
    spec = _spec(_settled(tmp_path, EVERYTHING, *flags))
    assert (spec.num_decode, spec.http_port, spec.restart) == (1, 9000, True)
    for argv in (spec.worker_argv("decode-0", Path("/s"), "a:1"), spec.worker_argv("prefill-0", Path("/s"), "a:1")):
        assert {"--num-blocks=32", "--log-level=debug"} <= set(argv)
    assert "--log-level=debug" in spec.router_argv(Path("/s"), {})
    text = "model: m\ndecode:\n  block_size: 64\n"
    spec = _spec(_settled(tmp_path, text, "--decode-block-size=32"))
    assert "--block-size=32" in spec.worker_argv("decode-0", Path("/s"), "a:1")


def test_every_switch_that_a_file_can_turn_on_a_flag_can_turn_off(tmp_path: Path) -> None:
    switches = [option.name for option in build_parser().parse_args(["up"]).keys.options if option.kind is bool]
    assert {"ray", "detach", "restart"} <= set(switches)
    text = "model: m\n" + "".join(f"{name}: true\n" for name in switches)
    flags = [f"--no-{name.replace('_', '-')}" for name in switches]
    settled = vars(_settled(tmp_path, text, *flags))
    assert [name for name in switches if settled[name]] == []


def test_settling_twice_changes_nothing(tmp_path: Path) -> None:
    arguments = _settled(tmp_path, EVERYTHING)
    assert settle(arguments) == arguments
    assert arguments.sections["decode"]["num_blocks"] == 128


def test_flags_alone_mean_what_they_did() -> None:
    arguments = settle(build_parser().parse_args(["up", "--model", "m", "--no-restart", "--drain-timeout", "3"]))
    assert (arguments.model, arguments.restart, arguments.drain_timeout_s) == ("m", False, 3.0)
    assert (arguments.prefill_workers, arguments.http_port, arguments.served_model_name) == (1, 8000, None)
    assert arguments.sections == {"router": {}, "prefill": {}, "decode": {}}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("prefill_workers: 1", "--model is required"),
        ("model: m\nprefil: 1", "did you mean prefill?"),
        ("model: m\nprefill: 1", "line 2: prefill: must be keys with values"),
        ("model: m\nmax_in_flight: 1", "there is no key 'max_in_flight'"),
        ("model: m\nrouter:\n  max_inflight: 1", "in router; did you mean max_in_flight?"),
        ("model: m\nrouter:\n  model: x", "line 3: router.model: this belongs at the top"),
        ("model: m\ndecode:\n  worker_id: x", "line 3: decode.worker_id: the launcher decides this"),
        ("model: m\nprefill:\n  weight_dtype: bf16", "prefill.weight_dtype: this belongs at the top"),
        ("model: m\nhttp_port: 1\nrouter:\n  http_port: 1", "http_port is there twice: at the top and in router"),
        ("model: m\nhttp_port: x", "line 2: http_port: must be a whole number, not text"),
        ("model: m\nkv_cache_dtype: fp64", "kv_cache_dtype: must be one of"),
        ("model: m\nlog_json: 1", "log_json: must be true or false"),
        ("model: m\ntransports: tcp", "transports: must be a list"),
        ("model: m\ndecode:\n  token_budget: 8", "decode-0: --token-budget must be at least --max-num-seqs"),
        ("model: m\nrouter:\n  max_queued: 0", "--max-queued must be at least 1"),
    ],
)
def test_what_makes_no_cluster_ends_with_status_2_before_anything_starts(
    text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    assert main(["up", "--config", str(path), "--print-config"]) == 2
    captured = capsys.readouterr()
    assert said in captured.err
    assert captured.out == ""


def test_a_file_that_is_not_there_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["up", "--model", "m", "--config", str(tmp_path / "nothing"), "--print-config"]) == 2
    assert "nothing" in capsys.readouterr().err


def test_a_model_is_required_from_flag_or_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["up"]) == 2
    assert "--model is required" in capsys.readouterr().err


def test_what_is_printed_means_the_same_when_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = _settled(tmp_path, EVERYTHING, "--access-log", "--lease-s=2.5", "--strict-handoff")
    printed = cluster_yaml(first)
    again = _settled(tmp_path, printed)
    assert _values(again) == _values(first)
    assert main(["up", f"--config={tmp_path / 'cluster.yaml'}", "--print-config"]) == 0
    assert capsys.readouterr().out == printed


def _values(arguments: argparse.Namespace) -> dict[str, Any]:
    return {name: value for name, value in vars(arguments).items() if name not in ("config", "keys", "run")}


def test_help_still_shows_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["up", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "OpenAI API; 0 = any free. Default: 8000." in shown
    assert "Start a process that has died again. Default: on." in shown
    assert "SUPPRESS" not in shown


def test_a_section_takes_what_its_process_takes_and_the_launcher_does_not_decide() -> None:
    for section in SECTIONS:
        names = {option.name for option in section_options(section)}
        assert {"log_level", "trace_file"} <= names
        assert not names & {"model", "cluster_secret_file", "exit_on_stdin_close", "worker_id", "routers"}
