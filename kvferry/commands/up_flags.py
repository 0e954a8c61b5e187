"""The flags of `kvferry up`, and the cluster that they ask for."""

import argparse
from pathlib import Path

from kvferry.cluster_file import add_config_flags
from kvferry.cluster_spec import ClusterSpec, RoleCommands
from kvferry.commands.autoscaling import add_autoscale_arguments
from kvferry.commands.base import absolute_path
from kvferry.commands.door import add_door_arguments, door_fields
from kvferry.commands.dtypes import add_dtype_arguments
from kvferry.commands.in_ray import add_placement_arguments, add_ray_arguments
from kvferry.commands.observing import add_observing_arguments, observing_fields
from kvferry.commands.routing import add_router_arguments, router_flags
from kvferry.commands.transfer import add_transfer_arguments, transfer_fields
from kvferry.model_prep import DEFAULT_CACHE_DIR


def add_up_arguments(parser: argparse.ArgumentParser) -> None:
    """All of them. Each is a key of `--config` too."""
    parser.add_argument("--model", required=True, help="Required. A directory, a .gguf file, or smollm2-135m-instruct.")
    parser.add_argument("--served-model-name", help="Name in requests. Default: the model's own.")
    parser.add_argument(
        "--prefill-workers", "--prefill", type=int, default=1, metavar="N", help="How many. Default: 1."
    )
    parser.add_argument("--decode-workers", "--decode", type=int, default=1, metavar="N", help="How many. Default: 1.")
    parser.add_argument("--host", default="127.0.0.1", help="Address the router listens on. Default: %(default)s.")
    parser.add_argument("--http-port", type=int, default=8000, help="OpenAI API; 0 = any free. Default: %(default)s.")
    parser.add_argument("--grpc-port", type=int, default=8001, help="gRPC API; 0 = any free. Default: %(default)s.")
    parser.add_argument("--block-size", type=int, help="Tokens a KV block; a power of two from 8 to 128.")
    parser.add_argument(
        "--num-blocks", type=int, help="Blocks in each worker's KV pool. Default: by free memory, 2 GiB at most."
    )
    parser.add_argument("--token-budget", type=int, help="Most tokens a worker computes in one step.")
    parser.add_argument("--max-num-seqs", type=int, help="Most sequences a worker computes in one step.")
    parser.add_argument("--tensor-parallel", type=int, metavar="N", help="Processes that each worker's model is split over. Default: 1.")  # fmt: skip # noqa: E501
    parser.add_argument("--speculative-tokens", type=int, metavar="N", help="Most tokens that a decoding sequence guesses ahead in a step, from its own text. Default: 0, none.")  # fmt: skip # noqa: E501
    add_dtype_arguments(parser)
    add_transfer_arguments(parser)
    add_door_arguments(parser)
    add_router_arguments(parser)
    add_observing_arguments(parser)
    parser.add_argument("--strict-handoff", action=argparse.BooleanOptionalAction, default=False, help="Fail a request whose hand-off from a prefill worker is not proven whole.")  # fmt: skip # noqa: E501
    parser.add_argument("--cache-dir", type=absolute_path, default=DEFAULT_CACHE_DIR, help="Prepared models. Default: %(default)s.")  # fmt: skip # noqa: E501
    parser.add_argument(
        "--state-dir", type=absolute_path, help="State, secret and logs of this cluster. Default: a new one."
    )
    parser.add_argument("--log-dir", type=absolute_path, help="Logs of its processes. Default: in the state directory.")
    parser.add_argument("--restart", action=argparse.BooleanOptionalAction, default=True, help="Start a process that has died again. Default: on.")  # fmt: skip # noqa: E501
    parser.add_argument(
        "--start-timeout-s",
        "--start-timeout",
        type=float,
        default=180.0,
        metavar="SECONDS",
        help="Longest wait until all is up. Default: %(default)g.",
    )
    parser.add_argument("--drain-timeout-s", "--drain-timeout", type=float, default=30.0, metavar="SECONDS", help="Time for running requests to finish at the end. Default: %(default)g.")  # fmt: skip # noqa: E501
    add_ray_arguments(parser, address_flags=("--ray-address", "--address"))
    add_placement_arguments(parser)
    add_autoscale_arguments(parser)
    # Last: every flag above is a key of the file too.
    add_config_flags(parser)


def spec_of(arguments: argparse.Namespace, commands: RoleCommands, model_dir: Path, name: str) -> ClusterSpec:
    """The cluster that settled flags ask for, with this prepared model, called `name`."""
    return ClusterSpec(
        model_dir=model_dir,
        served_model_name=name,
        num_prefill=arguments.prefill_workers,
        num_decode=arguments.decode_workers,
        host=arguments.host,
        http_port=arguments.http_port,
        grpc_port=arguments.grpc_port,
        block_size=arguments.block_size,
        num_blocks=arguments.num_blocks,
        token_budget=arguments.token_budget,
        max_num_seqs=arguments.max_num_seqs,
        speculative_tokens=arguments.speculative_tokens,
        tensor_parallel=arguments.tensor_parallel,
        kv_cache_dtype=arguments.kv_cache_dtype,
        strict_handoff=arguments.strict_handoff,
        router={**router_flags(arguments), **arguments.sections["router"]},
        prefill=arguments.sections["prefill"],
        decode=arguments.sections["decode"],
        restart=arguments.restart,
        start_timeout_s=arguments.start_timeout_s,
        drain_timeout_s=arguments.drain_timeout_s,
        commands=commands,
        **transfer_fields(arguments),
        **door_fields(arguments),
        **observing_fields(arguments),
    )
