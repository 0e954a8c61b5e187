import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from kvferry.run_dir import RunDir, RunDirInUseError, live_state, newest_live_state, process_start_ticks


def _age(path: Path, seconds: int) -> None:
    os.utime(path, (seconds, seconds))


def test_a_run_has_a_secret_that_only_its_owner_can_read(tmp_path: Path) -> None:
    run = RunDir.create(root=tmp_path)
    assert run.path.parent == tmp_path
    assert stat.S_IMODE(run.secret_path.stat().st_mode) == 0o600
    assert stat.S_IMODE(run.path.stat().st_mode) == 0o700


def test_state_is_found_while_the_launcher_lives_and_gone_after_clear(tmp_path: Path) -> None:
    run = RunDir.create(root=tmp_path)
    assert live_state(run.path) is None
    run.write_state({"grpc_address": "127.0.0.1:5"})
    state = live_state(run.path)
    assert state is not None
    assert (state["grpc_address"], state["state_dir"]) == ("127.0.0.1:5", str(run.path))
    assert stat.S_IMODE((run.path / "state.json").stat().st_mode) == 0o600
    run.clear()
    assert live_state(run.path) is None
    assert not run.secret_path.exists()


def test_a_launcher_that_died_or_whose_pid_is_used_again_is_not_live(tmp_path: Path) -> None:
    run = RunDir.create(root=tmp_path)
    run.write_state({})
    path = run.path / "state.json"
    state = json.loads(path.read_text())
    path.write_text(json.dumps({**state, "launcher_started": state["launcher_started"] - 1}))
    assert live_state(run.path) is None
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    path.write_text(json.dumps({**state, "launcher_pid": gone.pid}))
    assert live_state(run.path) is None


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"launcher_pid": "x", "launcher_started": 1}'])
def test_a_damaged_state_file_counts_as_none(tmp_path: Path, content: str) -> None:
    (tmp_path / "state.json").write_text(content)
    assert live_state(tmp_path) is None


def test_the_newest_live_cluster_wins(tmp_path: Path) -> None:
    runs = [RunDir.create(root=tmp_path) for _ in range(3)]
    for index, run in enumerate(runs):
        run.write_state({"index": index})
    for run, age in zip(runs, (100, 300, 200), strict=True):
        _age(run.path / "state.json", age)
    newest = newest_live_state(tmp_path)
    assert newest is not None
    assert newest["index"] == 1
    runs[1].clear()
    newest = newest_live_state(tmp_path)
    assert newest is not None
    assert newest["index"] == 2
    assert newest_live_state(tmp_path / "nowhere") is None


def test_a_directory_with_a_live_cluster_is_refused_and_a_dead_one_used_again(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "mine")
    run.write_state({})
    with pytest.raises(RunDirInUseError, match="mine"):
        RunDir.create(tmp_path / "mine")
    run.clear()
    first_secret = RunDir.create(tmp_path / "mine").secret_path.read_bytes()
    assert RunDir.create(tmp_path / "mine").secret_path.read_bytes() != first_secret


def test_only_the_latest_dead_runs_are_kept_and_nothing_else_is_touched(tmp_path: Path) -> None:
    for index in range(12):
        (tmp_path / f"dead-{index}" / "logs").mkdir(parents=True)
        _age(tmp_path / f"dead-{index}", 1000 + index)
    (tmp_path / "not-ours").mkdir()
    live = RunDir(tmp_path / "live")
    (live.path / "logs").mkdir(parents=True)
    live.write_state({})
    _age(live.path, 1)
    RunDir.create(root=tmp_path)
    left = {path.name for path in tmp_path.iterdir()}
    assert {"not-ours", "live", "dead-11", "dead-4"} <= left
    assert not {"dead-0", "dead-3"} & left


def test_a_zombie_counts_as_ended() -> None:
    child = subprocess.Popen([sys.executable, "-c", "pass"], stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.read()  # its end of the pipe closes when it ends; nobody has reaped it
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert process_start_ticks(child.pid) is None
    child.communicate()
    assert process_start_ticks(os.getpid()) is not None
