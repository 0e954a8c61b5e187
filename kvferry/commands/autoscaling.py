"""Flags of `kvferry up` about the autoscaler."""

import argparse
from dataclasses import fields

from kvferry.scaling.autoscaler import DEFAULT_POLICY, AutoscaleOptions
from kvferry.scaling.scaling_policy import ScalingLimits

_HELP = {
    "min_prefill": "Fewest prefill workers.",
    "max_prefill": "Most prefill workers.",
    "min_decode": "Fewest decode workers.",
    "max_decode": "Most decode workers.",
    "max_workers": "Most workers of both roles together.",
    "prefill_backlog_steps": "Steps of prompts that may wait for each prefill worker.",
    "decode_kv_target": "Share of the KV blocks of decode workers that should be in use at most.",
    "decode_slots_target": "Share of the sequences that decode workers can step that should be there at most.",
    "high": "Pressure, against these targets, above which a role gets a worker more.",
    "high_when_missing": "The same while requests miss the targets of their class.",
    "low": "Pressure below which a role must stay without a worker, for that to be taken away.",
    "slo_target": "Share of requests that should meet the targets of their class.",
    "up_after_s": "Seconds that a role must be short before it gets a worker more.",
    "down_after_s": "Seconds that a role must be ample before it loses one.",
    "cooldown_s": "Seconds between two changes.",
}


def add_autoscale_arguments(parser: argparse.ArgumentParser) -> None:
    """The mode, the policy, and one flag for each field of ScalingLimits."""
    group = parser.add_argument_group("autoscaler")
    group.add_argument("--autoscale", choices=("off", "dry-run", "on"), default="off", help="Add, remove and flip workers as the load asks for; dry-run only writes down what it would do. Default: %(default)s.")  # fmt: skip # noqa: E501
    group.add_argument("--autoscale-policy", default=DEFAULT_POLICY, metavar="MODULE:CLASS", help="What decides. Default: %(default)s.")  # fmt: skip # noqa: E501
    for one in fields(ScalingLimits):
        group.add_argument(
            f"--autoscale-{one.name.replace('_', '-')}",
            type=type(one.default),
            default=one.default,
            metavar="N",
            help=f"{_HELP[one.name]} Default: %(default)s.",
        )


def autoscale_options(arguments: argparse.Namespace) -> AutoscaleOptions:
    """What the flags say. Raises ValueError for what makes no sense."""
    limits = ScalingLimits(**{one.name: getattr(arguments, f"autoscale_{one.name}") for one in fields(ScalingLimits)})
    options = AutoscaleOptions(mode=arguments.autoscale, policy=arguments.autoscale_policy, limits=limits)
    if options.mode != "off":
        options.validate()
    return options
