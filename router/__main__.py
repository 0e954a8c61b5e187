"""`python -m router`: one router process, or the supervisor of several (`supervisor.py`).

1. Read the tokenizer. 2. Listen on all ports and say so in one JSON line on standard output. 3. Serve. 4. On SIGTERM:
drain, stop, exit 0. A second signal ends the process at once. SIGUSR1: likewise, for a successor (`succession.py`).
"""

import asyncio
import os
import sys

from router.config import RouterConfig
from router.service import RouterService
from router.succession import Succession, before
from router.supervisor import supervise
from router.text.tokenizer import Tokenizer
from runtime.child_process import LaunchError
from runtime.collector import settle_for_serving
from runtime.config import config_flags, parse_config
from runtime.process import run_service, write_ready_line
from runtime.secret import read_secret_file
from runtime.telemetry import setup_logging


def main() -> int:
    """Parse flags, serve until drained. Returns the exit status."""
    config = parse_config(RouterConfig, prog="router")
    # Several write to one log.
    name = f"router-{os.getpid()}" if config.share_ports else "router"
    setup_logging(level=config.log_level, json_lines=config.log_json, process=name)
    try:
        if config.router_processes > 1:
            return run_service(
                lambda shutdown: supervise(config, config_flags(config), shutdown),
                exit_on_stdin_close=config.exit_on_stdin_close,
            )
        secret = read_secret_file(config.cluster_secret_file)
        tokenizer = Tokenizer.load(config.model)
        return run_service(
            lambda shutdown: _serve(config, secret, tokenizer, shutdown),
            exit_on_stdin_close=config.exit_on_stdin_close,
        )
    except (LaunchError, OSError, ValueError) as error:
        sys.stderr.write(f"router: {error}\n")
        return 1


async def _serve(config: RouterConfig, secret: bytes, tokenizer: Tokenizer, shutdown: asyncio.Event) -> int:
    router = RouterService(config, secret, tokenizer)
    succession = Succession(shutdown)
    try:
        ports = await before(shutdown, router.start())
        if ports is None:
            return 0
        settle_for_serving()
        write_ready_line("router", router_id=router.router_id, **ports)
        await shutdown.wait()
        await router.drain(has_successor=succession.has_successor)
    finally:
        await router.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
