"""`up`, `status` and `down` about a cluster in Ray; Ray is a fake, router and workers are stand-ins."""

import sys
from pathlib import Path

import pytest

from kvferry.__main__ import build_parser, main
from kvferry.cluster_spec import RoleCommands
from kvferry.commands.status import Found, show_processes
from kvferry.commands.up import run_up
from kvferry.console import Console
from kvferry.launchers.ray_cluster import RayCluster
from kvferry.launchers.ray_node import NodeFacts
from kvferry.run_dir import process_start_ticks
from tests.support.fake_ray import FakeRay

SUPPORT = Path(__file__).parents[1] / "support"
PREPARE = (sys.executable, str(SUPPORT / "fake_prepare.py"))
COMMANDS = RoleCommands(
    *((sys.executable, str(SUPPORT / "fake_process.py"), role, "good") for role in ("router", "prefill", "decode"))
)


async def test_up_detached_leaves_a_cluster_that_others_find_by_its_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ray = FakeRay()
    flags = ["--ray", "--detach", "--ray-cluster", "mine", "--decode-shape", "cpus=2", "--state-dir", str(tmp_path)]
    ports = ["--http-port", "0", "--grpc-port", "0", "--cache-dir", str(tmp_path / "models")]
    arguments = build_parser().parse_args(["up", "--model", "tiny", *flags, *ports])
    status = await run_up(arguments, Console(), commands=COMMANDS, prepare_command=PREPARE, link=ray)
    assert status == 0
    said = capsys.readouterr().out
    assert "Ray has room for prefill-0, decode-0" in said
    # The fake makes no directory: as on a node that has not got the model yet.
    assert "decode-0: progress, preparing the model on 127.0.0.1" in said
    assert {name: plan.bundle for name, plan in ray.groups_held.items()} == {
        "mine/prefill-0": {"CPU": 1.0},
        "mine/decode-0": {"CPU": 2.0},
    }
    cluster = await RayCluster.attach(ray, "mine", lambda event: None)
    assert all(process_start_ticks(pid) is not None for pid in cluster.pids.values())
    assert await cluster.stop()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--detach"], "--detach goes only with --ray"),
        (["--ray", "--log-dir", "/tmp/logs"], "--log-dir goes not with --ray"),
        (["--ray", "--decode-shape", "gpu=1"], "--decode-shape: 'gpu=1' is not one of cpus=N"),
        (["--ray", "--prefill-shape", "gpus=1.5"], "--prefill-shape: gpus must be whole above 1"),
    ],
)
def test_flags_that_do_not_go_together_are_refused(
    flags: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["up", "--model", "tiny", "--print-config", *flags]) == 2
    assert said in capsys.readouterr().err


def test_status_shows_a_row_for_each_process_and_says_of_which_it_knows_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    facts = NodeFacts(
        name="decode-0", group="main/decode-0", host="10.0.0.2", node_id="n", pid=42, running=True, starts=3,
        devices="1", ports={}, log="/x/process.log", role="decode",
    )  # fmt: skip
    found = Found({"decode-0": facts, "decode-1": "it is away"}, {"decode-0": "last words"}, "")
    show_processes(found, Console())
    assert capsys.readouterr().out.splitlines() == [
        "process   node        pid  running  starts  devices  group",
        "decode-0  10.0.0.2    42   yes      3       1        main/decode-0",
        "decode-1  it is away",
        "",
        "decode-0:",
        "last words",
        "",
    ]
