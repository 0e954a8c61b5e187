"""Prepare the model before anything starts, in a process of its own: the launcher stays small and torch stays out."""

import asyncio
import json
import os
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime.child_process import CHILD_ENVIRONMENT, LaunchError, describe_exit

DEFAULT_CACHE_DIR = Path("~/.cache/kvferry").expanduser()
PREPARE_COMMAND = (sys.executable, "-m", "engine.prepare")


@dataclass(frozen=True, slots=True)
class PreparedDir:
    """Where the prepared model lies and the name it is served under."""

    path: Path
    name: str


async def prepare_model(
    source: str,
    cache_dir: Path,
    on_progress: Callable[[str, float], None],
    *,
    command: Sequence[str] = PREPARE_COMMAND,
    weight_dtype: str | None = None,
) -> PreparedDir:
    """Convert `source`, or find it converted. `on_progress(stage, fraction)` is called as work goes on.

    `weight_dtype`: how weights are stored; None = fp32, or what a directory has that is prepared already.

    Raises LaunchError with the reason when there is no such model or it cannot be used.
    """
    process = await asyncio.create_subprocess_exec(
        *command,
        source,
        "--cache-dir",
        str(cache_dir),
        "--json",
        *(() if weight_dtype is None else ("--weight-dtype", weight_dtype)),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, **CHILD_ENVIRONMENT},
    )
    assert process.stdout is not None
    assert process.stderr is not None
    outcome: dict[str, Any] = {}
    errors: deque[str] = deque(maxlen=15)
    gather_errors = asyncio.create_task(_collect(process.stderr, errors))
    try:
        async for line in process.stdout:
            facts = _parse(line)
            if facts.get("event") == "progress":
                on_progress(str(facts.get("stage", "")), float(facts.get("fraction", 0.0)))
            elif facts:
                outcome = facts
        status = await process.wait()
        await gather_errors
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        gather_errors.cancel()
    if status == 0 and outcome.get("event") == "ready":
        return PreparedDir(Path(outcome["path"]), str(outcome["name"]))
    reason = outcome.get("message") or "".join(errors).rstrip() or describe_exit(status)
    raise LaunchError(f"cannot prepare the model {source!r}: {reason}")


async def _collect(stream: asyncio.StreamReader, lines: deque[str]) -> None:
    async for line in stream:
        lines.append(line.decode(errors="replace"))


def _parse(line: bytes) -> dict[str, Any]:
    try:
        value: Any = json.loads(line)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
