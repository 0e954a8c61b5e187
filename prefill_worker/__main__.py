"""`python -m prefill_worker`: one prefill worker process."""

import sys

from runtime.collector import loading

with loading():
    from prefill_worker.config import PrefillConfig
    from prefill_worker.process import PrefillProcess
    from runtime.config import parse_config
    from runtime.process import run_service
    from runtime.telemetry import setup_logging
    from runtime.worker_host import host_worker


def main() -> int:
    """Parse flags, serve until drained. Returns the exit status."""
    config = parse_config(PrefillConfig, prog="prefill_worker")
    setup_logging(level=config.log_level, json_lines=config.log_json, process=config.worker_id)
    return run_service(
        lambda shutdown: host_worker(config, "prefill", lambda secret: PrefillProcess(config, secret), shutdown),
        exit_on_stdin_close=config.exit_on_stdin_close,
    )


if __name__ == "__main__":
    sys.exit(main())
