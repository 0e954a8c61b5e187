"""Flags of `kvferry up` and `kvferry demo` that say in which dtypes workers keep weights and KV."""

import argparse

from kv_cache.layout import KVDtype

_WEIGHT_DTYPES = ("fp32", "bf16", "fp16", "int8")


def add_dtype_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags. Arithmetic is fp32 in any case."""
    parser.add_argument(
        "--weight-dtype",
        choices=_WEIGHT_DTYPES,
        help="How weights are stored. Default: fp32, or what a prepared directory has.",
    )
    parser.add_argument(
        "--kv-cache-dtype",
        choices=[dtype.value for dtype in KVDtype],
        help="Element type of the workers' KV pools. Default: fp32.",
    )
