"""The processes of a split model: they compute the same text, notice each other's end, and leave nobody behind."""

import os
import select
import signal
from pathlib import Path

import pytest

from engine.build import start_followers
from engine.options import EngineOptions
from engine.parallel.channel import PoolFile
from engine.parallel.leader import Followers, ParallelError
from kv_transfer.region import MemoryRegion
from runtime.errors import KvferryError
from tests.support.json_process import JsonProcess
from tests.support.split_engine import SplitEngine

MODEL = Path(__file__).parents[1] / "data" / "tiny-real"
PROMPTS = [[1, *range(300, 300 + length)] for length in (3, 17, 70, 16)]
WAIT_S = 60.0  # only ever reached by a test that fails


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def test_two_processes_write_the_text_of_one_until_one_is_killed(cache: Path) -> None:
    alone = SplitEngine(MODEL, cache, 1)
    expected = alone.generate(PROMPTS, 20)
    prompt = [1, *range(400, 500)]
    scores = alone.score(prompt)
    assert len(scores) == 100
    alone.close()
    split = SplitEngine(MODEL, cache, 2)
    try:
        with pytest.raises(ValueError, match="shared memory"):
            start_followers(split.options, split.plan, None)
        (pid,) = split.pids
        os.kill(pid, signal.SIGTERM)  # a worker that drains still needs its ranks
        assert split.generate(PROMPTS, 20) == expected
        assert split.score(prompt) == pytest.approx(scores, abs=1e-4)

        announced: list[int] = []

        def kill_at_first_layer(layer: int) -> None:
            if not announced:
                os.kill(pid, signal.SIGKILL)
            announced.append(layer)

        killed = rf"rank 1 of this worker \(process {pid}\) was killed by SIGKILL"
        with pytest.raises(ParallelError, match=killed):
            split.generate([[5, 6, 7]], 4, on_layer=kill_at_first_layer)
        assert announced[0] == 0
        # In the middle of a step as well as between steps.
        with pytest.raises(ParallelError, match=killed):
            split.run_again()
    finally:
        split.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_ranks_end_when_their_worker_is_killed(cache: Path) -> None:
    worker = JsonProcess("tests.support.split_engine", str(MODEL), str(cache))
    try:
        (pid,) = worker.hear_within(WAIT_S)["pids"]
        rank = os.pidfd_open(pid)
        worker.signal(signal.SIGKILL)
        ended = select.poll()
        ended.register(rank, select.POLLIN)
        assert ended.poll(WAIT_S * 1000), "the rank outlived its worker"
        os.close(rank)
    finally:
        worker.close()


def test_a_rank_that_cannot_start_says_why(tmp_path: Path) -> None:
    options = EngineOptions(model=str(tmp_path / "nothing"), cache_dir=tmp_path, num_blocks=4, tensor_parallel=2)
    with MemoryRegion.allocate(4096, shared=True) as pool:
        assert pool.file is not None
        followers = Followers(options, PoolFile(*pool.file), 4096)
        with pytest.raises(KvferryError, match=r"rank 1 of this worker cannot start: .*nothing"):
            followers.connect()
        followers.close(WAIT_S)
