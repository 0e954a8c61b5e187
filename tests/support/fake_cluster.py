"""`fake_cluster.py ROUTER PREFILL DECODE up|demo [flags]`: the real command with fake processes of these behaviours."""

import argparse
import asyncio
import sys
from pathlib import Path

from kvferry.__main__ import build_parser, execute
from kvferry.cluster_spec import RoleCommands
from kvferry.commands.demo import run_demo
from kvferry.commands.up import run_up
from kvferry.console import Console

SUPPORT = Path(__file__).parent
PREPARE = (sys.executable, str(SUPPORT / "fake_prepare.py"))


def main() -> int:
    behaviours, argv = sys.argv[1:4], sys.argv[4:]
    roles = ("router", "prefill", "decode")
    commands = RoleCommands(
        *((sys.executable, str(SUPPORT / "fake_process.py"), *pair) for pair in zip(roles, behaviours, strict=True))
    )
    arguments = build_parser().parse_args(argv)

    def run(arguments: argparse.Namespace, console: Console) -> int:
        if arguments.command == "demo":
            root = arguments.cache_dir / "run"
            return asyncio.run(run_demo(arguments, console, commands=commands, prepare_command=PREPARE, run_root=root))
        return asyncio.run(run_up(arguments, console, commands=commands, prepare_command=PREPARE))

    arguments.run = run
    return execute(arguments)


if __name__ == "__main__":
    sys.exit(main())
