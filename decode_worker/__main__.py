"""`python -m decode_worker`: one worker process, which begins as a decode worker."""

import sys

from runtime.collector import loading

with loading():
    from decode_worker.config import DecodeConfig
    from runtime.config import parse_config
    from worker.main import run_worker


def main() -> int:
    """Parse flags, serve until drained. Returns the exit status."""
    return run_worker(parse_config(DecodeConfig, prog="decode_worker"), "decode")


if __name__ == "__main__":
    sys.exit(main())
