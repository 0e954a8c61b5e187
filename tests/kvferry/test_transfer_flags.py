"""The flags of `up` and `demo` about the transfer of KV, and the cluster that they describe."""

from pathlib import Path

import pytest

from kvferry.__main__ import build_parser
from kvferry.cluster_file import settle
from kvferry.cluster_spec import ClusterSpec
from kvferry.commands.transfer import transfer_fields

COMMANDS = (["up", "--model", "m"], ["demo"])


def _spec(*argv: str) -> ClusterSpec:
    arguments = build_parser().parse_args(argv)
    if arguments.command == "up":
        arguments = settle(arguments)
    return ClusterSpec(model_dir=Path("/m"), served_model_name="m", **transfer_fields(arguments))


@pytest.mark.parametrize("command", COMMANDS)
def test_without_flags_everything_is_left_to_the_workers(command: list[str]) -> None:
    assert _spec(*command) == ClusterSpec(model_dir=Path("/m"), served_model_name="m")


@pytest.mark.parametrize("command", COMMANDS)
def test_each_flag_is_a_field_of_the_cluster(command: list[str]) -> None:
    flags = (
        "--transports=ucx, tcp --forbid-transports=shm --prefill-block-size=8 --decode-block-size=64 "
        "--kv-wire-dtype=int8 --max-backlog-mb=3 --lease-s=2.5 --require-transport=tcp,shm --no-reuse-decode-kv"
    )
    spec = _spec(*command, *flags.replace(", ", ",").split())
    spec.validate()
    assert spec.transports == ("ucx", "tcp")
    assert spec.forbid_transports == ("shm",)
    assert (spec.prefill_block_size, spec.decode_block_size) == (8, 64)
    assert (spec.require_transport, spec.reuse_decode_kv) == (("tcp", "shm"), False)
    assert (spec.kv_wire_dtype, spec.max_backlog_mb, spec.lease_s) == ("int8", 3, 2.5)


def test_one_transport_may_be_named_in_the_singular() -> None:
    assert _spec("up", "--model", "m", "--transport", "tcp").transports == ("tcp",)


@pytest.mark.parametrize(
    "flags", ["--decode-block-size=12", "--kv-wire-dtype=fp64", "--max-backlog-mb=many", "--lease-s=soon"]
)
def test_nonsense_ends_with_two(flags: str) -> None:
    with pytest.raises(SystemExit) as caught:
        build_parser().parse_args(["up", "--model", "m", flags])
    assert caught.value.code == 2
