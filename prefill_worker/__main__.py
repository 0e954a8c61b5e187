"""`python -m prefill_worker`: one worker process, which begins as a prefill worker."""

import sys

from runtime.collector import loading

with loading():
    from prefill_worker.config import PrefillConfig
    from runtime.config import parse_config
    from worker.main import run_worker


def main() -> int:
    """Parse flags, serve until drained. Returns the exit status."""
    return run_worker(parse_config(PrefillConfig, prog="prefill_worker"), "prefill")


if __name__ == "__main__":
    sys.exit(main())
