import asyncio
import errno
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from io import FileIO
from pathlib import Path

import pytest

import runtime.child_process
from kvferry.run_dir import process_start_ticks
from runtime.child_process import ChildProcess, LaunchError, describe_exit

FAKE = Path(__file__).parents[1] / "support" / "fake_process.py"


@asynccontextmanager
async def child(tmp_path: Path, behaviour: str, name: str = "decode-0") -> AsyncIterator[ChildProcess]:
    argv = (sys.executable, str(FAKE), "decode", behaviour, "--flag=1")
    process = ChildProcess(name, argv, tmp_path / f"{name}.log", tmp_path)
    try:
        yield process
    finally:
        await process.kill()


async def test_the_ready_line_is_found_among_other_output(tmp_path: Path) -> None:
    async with child(tmp_path, "good") as process:
        await process.start(30)
        assert process.ready["pid"] == process.pid
        assert process.ready["flags"] == ["--flag=1"]
        assert process.ready["omp"] == ["1", "PASSIVE"]
        assert process.exit_status is None
        assert await process.stop(30)
        assert process.exit_status == 0
        assert "not the ready line" in process.log_tail()
        assert "decode starts" in process.log_tail()


class FullDisk(FileIO):
    """A file that takes nothing more."""

    def write(self, data: object) -> int:
        raise OSError(errno.ENOSPC, "no space left on device")


async def test_a_full_disk_under_its_log_holds_nothing_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime.child_process, "FileIO", FullDisk)
    async with child(tmp_path, "chatters") as process:
        await process.start(30)
        assert process.ready["flags"] == ["--flag=1"]
        # It chatters more than a pipe holds: it could not hear this if nobody had read that.
        assert await process.stop(30)
        assert process.exit_status == 0


async def test_it_runs_in_its_own_session_so_that_ctrl_c_reaches_the_launcher_alone(tmp_path: Path) -> None:
    async with child(tmp_path, "good") as process:
        await process.start(30)
        assert os.getsid(process.pid) == process.pid


async def test_a_process_that_dies_at_start_is_reported_with_the_end_of_its_log(tmp_path: Path) -> None:
    async with child(tmp_path, "dies-at-start") as process:
        with pytest.raises(LaunchError) as caught:
            await process.start(30)
        assert "decode-0 exited with status 3" in str(caught.value)
        assert "no memory for the pool" in str(caught.value)


async def test_a_process_that_hangs_is_killed_at_the_deadline(tmp_path: Path) -> None:
    async with child(tmp_path, "hangs") as process:
        with pytest.raises(LaunchError, match="was not ready after 1 s"):
            await process.start(1)
        assert process.exit_status == -9
        assert process_start_ticks(process.pid) is None


async def test_a_cancelled_start_leaves_no_process(tmp_path: Path) -> None:
    async with child(tmp_path, "hangs") as process:
        starting = asyncio.create_task(process.start(60))
        await asyncio.wait([starting], timeout=0.5)
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        assert starting.cancelled()
        assert process_start_ticks(process.pid) is None


async def test_a_command_that_does_not_exist_is_a_launch_error(tmp_path: Path) -> None:
    process = ChildProcess("router", (str(tmp_path / "nothing"),), tmp_path / "log", tmp_path)
    with pytest.raises(LaunchError, match="cannot start router"):
        await process.start(5)
    assert await process.stop(1)


async def test_one_that_ignores_sigterm_is_killed_and_says_so(tmp_path: Path) -> None:
    async with child(tmp_path, "ignores-sigterm") as process:
        await process.start(30)
        assert not await process.stop(0.2)
        assert process.exit_status == -9


async def test_stopping_twice_or_after_the_end_is_harmless(tmp_path: Path) -> None:
    async with child(tmp_path, "dies-when-ready") as process:
        await process.start(30)
        assert await process.wait() == 4
        assert await process.stop(1)
        assert await process.stop(1)
        assert process.exit_status == 4


async def test_a_talkative_process_does_not_block_on_its_pipe(tmp_path: Path) -> None:
    async with child(tmp_path, "chatters") as process:
        await process.start(30)
        assert await process.stop(60)
        assert (tmp_path / "decode-0.log").stat().st_size > 200_000 * len("chatter")


def test_exits_are_described_in_words() -> None:
    assert describe_exit(0) == "exited with status 0"
    assert describe_exit(-15) == "was ended by SIGTERM"
