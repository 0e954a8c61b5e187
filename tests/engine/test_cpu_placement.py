"""The CPUs of a worker."""

import os
import subprocess
import sys

import pytest

from engine.cpu_placement import parse_cpus, pin

# In a process of its own: the CPUs of the tests' process belong to all tests.
_PIN_WITH_A_THREAD = """
import os, threading
from engine.cpu_placement import pin

cpu, told, seen = min(os.sched_getaffinity(0)), threading.Event(), []
thread = threading.Thread(target=lambda: (told.wait(), seen.append(os.sched_getaffinity(0))))
thread.start()
pin(str(cpu))
told.set()
thread.join()
assert seen == [{cpu}] == [os.sched_getaffinity(0)], seen
"""


def test_numbers_and_ranges_are_read() -> None:
    assert parse_cpus("0-3,6") == {0, 1, 2, 3, 6}
    assert parse_cpus("5") == {5}
    assert parse_cpus("2-2,2") == {2}


@pytest.mark.parametrize("text", ["", "a", "1-", "-1", "1,,2", "3-1", "0-8192", "1-2-3", " 1"])
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="--pin-cpus"):
        parse_cpus(text)


def test_without_a_list_nothing_changes() -> None:
    before = os.sched_getaffinity(0)
    pin("")
    assert os.sched_getaffinity(0) == before


def test_threads_that_run_already_are_moved_too() -> None:
    subprocess.run([sys.executable, "-c", _PIN_WITH_A_THREAD], check=True, timeout=60)


def test_cpus_that_the_machine_lacks_are_refused() -> None:
    with pytest.raises(ValueError, match="--pin-cpus 8191: this process may not use them"):
        pin("8191")
