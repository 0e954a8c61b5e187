"""`python -m decode_worker`: one decode worker process."""

import sys

from runtime.collector import loading

with loading():
    from decode_worker.config import DecodeConfig
    from decode_worker.process import DecodeProcess
    from runtime.config import parse_config
    from runtime.process import run_service
    from runtime.telemetry import setup_logging
    from runtime.worker_host import host_worker


def main() -> int:
    """Parse flags, serve until drained. Returns the exit status."""
    config = parse_config(DecodeConfig, prog="decode_worker")
    setup_logging(level=config.log_level, json_lines=config.log_json, process=config.worker_id)
    return run_service(
        lambda shutdown: host_worker(config, "decode", lambda secret: DecodeProcess(config, secret), shutdown),
        exit_on_stdin_close=config.exit_on_stdin_close,
    )


if __name__ == "__main__":
    sys.exit(main())
