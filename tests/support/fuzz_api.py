"""`python -m tests.support.fuzz_api --cases 10000`: the API of a real router process with fake workers behind it, under
requests made from its OpenAPI document. Ends with status 1 when an answer was wrong."""

import argparse
import asyncio
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path

import requests

from tests.support.api_fuzz import CASES_A_ROUND, ApiFuzz
from tests.support.fake_workers import Fabric, FakeDecode, FakePrefill
from tests.support.http_door import MODEL_DIR
from tests.support.router_process import attached, router
from tests.support.tool_templates import HERMES

MODEL = "tiny"


def with_tools(directory: Path) -> Path:
    """The test model with a chat template that knows tools, in a directory of its own."""
    model = directory / "model"
    shutil.copytree(MODEL_DIR, model)
    (model / "chat_template.jinja").write_text(HERMES)
    return model


async def fuzz(directory: Path, num_cases: int, seed: int) -> int:
    """Start everything, send the requests, and look whether the router still lives and has nothing left over. How many
    rounds had a wrong answer, each of which is told on stderr."""
    fabric = Fabric()
    workers = FakeDecode("decode-0", fabric), FakePrefill("prefill-0", fabric)
    model = with_tools(directory)
    async with router(directory, "--log-level=warning", model=model) as running, attached(running, *workers):
        document = (await asyncio.to_thread(requests.get, f"{running.url}/openapi.json", timeout=10)).json()
        statuses: Counter[tuple[str, int]] = Counter()
        failures = 0
        for number in range(max(1, num_cases // CASES_A_ROUND)):
            under_fire = ApiFuzz(document, running.url, MODEL)
            try:
                await asyncio.to_thread(under_fire.run, CASES_A_ROUND, seed + number)
            except BaseExceptionGroup as problems:
                failures += 1
                sys.stderr.write(f"round {seed + number}: {problems}\n{problems.exceptions}\n")
            except Exception as problem:
                failures += 1
                sys.stderr.write(f"round {seed + number}: {problem}\n")
            statuses += under_fire.statuses
            sys.stderr.write(f"{statuses.total()} answers, {failures} rounds with a wrong one\n")
        for (path, status), count in sorted(statuses.items()):
            sys.stderr.write(f"{count:6d} {status} {path}\n")
        left = await asyncio.to_thread(requests.get, f"{running.url}/debug/requests", timeout=10)
        assert left.json()["in_flight"] == []
        assert running.process.returncode is None
    return failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=10_000, help="about how many requests")
    parser.add_argument("--seed", type=int, default=0, help="of the first round; each has its own")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        return 1 if asyncio.run(fuzz(Path(directory), given.cases, given.seed)) else 0


if __name__ == "__main__":
    sys.exit(main())
