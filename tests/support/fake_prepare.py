"""Stands in for `python -m engine.prepare`: `fake_prepare.py SOURCE --cache-dir DIR --json`."""

import json
import sys


def main() -> int:
    source, cache_dir = sys.argv[1], sys.argv[3]
    for fraction in (0.1, 0.5):
        print(json.dumps({"event": "progress", "stage": "converting weights", "fraction": fraction}), flush=True)  # noqa: T201
    if source == "missing":
        print(json.dumps({"event": "error", "code": "unknown_model", "message": "there is no model 'missing'"}))  # noqa: T201
        return 1
    if source == "crash":
        raise MemoryError("conversion needs more memory")
    print(json.dumps({"event": "ready", "path": f"{cache_dir}/{source}", "name": source, "revision": "0"}))  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
