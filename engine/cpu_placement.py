"""Which CPUs a worker runs on."""

import os
from contextlib import suppress
from pathlib import Path

_MAX_CPU = 8191  # The most that Linux can be built for.


def parse_cpus(text: str) -> frozenset[int]:
    """`0-3,6` -> {0, 1, 2, 3, 6}. Raises ValueError for anything else."""
    cpus: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        if not first.isdecimal() or not (last or first).isdecimal() or part.endswith("-"):
            raise ValueError(f"--pin-cpus wants numbers and ranges such as 0-3,6, not {text!r}")
        low, high = int(first), int(last or first)
        if not low <= high <= _MAX_CPU:
            raise ValueError(f"--pin-cpus: {part} is no range of CPUs")
        cpus.update(range(low, high + 1))
    return frozenset(cpus)


def pin(text: str) -> None:
    """Run the whole process on the CPUs that `text` lists ("" = wherever the kernel likes).

    Threads that exist are moved, new ones and child processes follow. Raises ValueError for a list that is none, and
    for CPUs that this process may not use.
    """
    if not text:
        return
    cpus = parse_cpus(text)
    try:
        os.sched_setaffinity(0, cpus)
    except OSError as error:
        raise ValueError(f"--pin-cpus {text}: this process may not use them ({error.strerror})") from error
    for task in Path("/proc/self/task").iterdir():
        # A thread may have ended meanwhile.
        with suppress(ProcessLookupError):
            os.sched_setaffinity(int(task.name), cpus)
