"""`kvferry`, or `python -m kvferry`: the command line."""

import argparse
import os
import sys
from collections.abc import Sequence

from kvferry import __version__
from kvferry.commands.registry import COMMANDS
from kvferry.console import Console
from kvferry.run_dir import RunDirInUseError
from runtime.child_process import LaunchError
from runtime.errors import KvferryError


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns its exit status: 0 good, 1 failed, 2 bad flags, 130 interrupted."""
    return execute(build_parser().parse_args(argv))


def execute(arguments: argparse.Namespace) -> int:
    """Run the command of `arguments`, which `build_parser` made, and turn its failures into words and a status."""
    console = Console(as_json=arguments.json)
    try:
        status: int = arguments.run(arguments, console)
    except KvferryError as error:
        return _fail(console, error.code_name, error.message)
    except (LaunchError, RunDirInUseError) as error:
        return _fail(console, "launch_failed", str(error))
    except ValueError as error:
        return _fail(console, "invalid_request", str(error), status=2)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Whoever read our output has gone; flushing at exit must not fail once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return status


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="kvferry", description="Disaggregated prefill/decode serving with a KV hand-off you can prove."
    )
    parser.add_argument("--version", action="version", version=f"kvferry {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS:
        sub = subparsers.add_parser(command.name, help=command.help, description=command.help, allow_abbrev=False)
        command.add_arguments(sub)
        sub.add_argument("--json", action="store_true", help="Print JSON, one object a line.")
        sub.set_defaults(run=command.run)
    return parser


def _fail(console: Console, code: str, message: str, *, status: int = 1) -> int:
    console.emit({"error": {"code": code, "message": message}})
    console.complain(f"kvferry: {message}")
    return status


if __name__ == "__main__":
    sys.exit(main())
