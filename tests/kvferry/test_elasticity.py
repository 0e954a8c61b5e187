"""`kvferry scale` to a launcher that runs, and the autoscaler beside it; the workers are fakes."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from kvferry.__main__ import build_parser, main
from kvferry.cluster_file import settle
from kvferry.commands.autoscaling import autoscale_options
from kvferry.control import send_order
from kvferry.launchers.launcher import Launcher
from kvferry.run_dir import RunDir
from kvferry.scaling import elasticity
from kvferry.scaling import fleet as fleet_module
from kvferry.scaling.autoscaler import AutoscaleOptions
from kvferry.scaling.elasticity import Elasticity
from kvferry.scaling.scaling_policy import ScalingLimits
from tests.support.fake_fleet import FakeFleet


@pytest.fixture(autouse=True)
def looks_quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_module, "_POLL_S", 0.001)
    monkeypatch.setattr(elasticity, "open_admin", lambda launcher: launcher)


@asynccontextmanager
async def beside(
    fake: FakeFleet, path: Path, options: AutoscaleOptions | None = None
) -> AsyncIterator[tuple[RunDir, list[Any]]]:
    """A launcher that is up, and all that it says and writes."""
    run_dir, said = RunDir.create(path), []
    run_dir.write_state({"secret_file": str(run_dir.secret_path), "grpc_address": "127.0.0.1:1"})
    changes = Elasticity(
        cast(Launcher, fake),
        options or AutoscaleOptions(),
        control_path=run_dir.control_path,
        record_path=path / "autoscaler.log",
        say=said.append,
        emit=said.append,
    )
    async with changes:
        yield run_dir, said


async def command(*argv: str) -> int:
    """A command in a process of its own, as far as the launcher can tell."""
    return await asyncio.to_thread(main, argv)


async def test_scale_reaches_the_launcher_and_tells_both_sides(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = FakeFleet().start("prefill-0", "decode-0")
    async with beside(fake, tmp_path / "run") as (run_dir, said):
        flags = ("--state-dir", str(run_dir.path))
        assert await command("scale", "--prefill", "1", "--decode", "2", *flags) == 0
        assert await command("scale", "--decode", "2", "--json", *flags) == 0
        assert await command("scale", "--decode", "0", *flags) == 1
        assert await command("scale", *flags) == 2
    assert fake.told == ["add decode-1"]
    out, err = capsys.readouterr()
    assert out.splitlines()[:3] == ["starting one more decode worker", "decode-1 is ready", "added decode-1"]
    assert json.loads(out.splitlines()[3]) == {"event": "scaled", "flipped": [], "added": [], "removed": []}
    assert "a cluster needs --decode 1 or more" in err
    assert "say how many" in err
    assert said == ["starting one more decode worker", "decode-1 is ready"]


async def test_what_is_no_number_of_workers_is_refused(tmp_path: Path) -> None:
    fake = FakeFleet().start("prefill-0", "decode-0")
    async with beside(fake, tmp_path / "run") as (run_dir, _):
        for wrong in ("two", 1.5, True, -1, 10_000):
            with pytest.raises(Exception, match="decode must be 0 to 1024"):
                await send_order(run_dir.control_path, {"order": "scale", "decode": wrong}, lambda _: None)
    assert fake.told == []


async def test_a_cluster_that_does_not_run_cannot_be_scaled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert await command("scale", "--decode", "2", "--state-dir", str(tmp_path)) == 1
    assert await command("worker", "list", "--state-dir", str(tmp_path)) == 1
    assert capsys.readouterr().err.count("no running cluster found") == 2


@pytest.mark.parametrize(("mode", "told"), [("on", ["add decode-1"]), ("dry-run", [])])
async def test_the_autoscaler_writes_its_decisions_to_a_file(tmp_path: Path, mode: Any, told: list[str]) -> None:
    fake = FakeFleet().start("prefill-0", "decode-0")
    options = AutoscaleOptions(mode=mode, limits=ScalingLimits(min_decode=2))
    log = tmp_path / "run" / "autoscaler.log"
    async with beside(fake, tmp_path / "run", options) as (_, said), asyncio.timeout(20):
        while len(said) < len(told) + 1:  # noqa: ASYNC110 - nothing tells of a record
            await asyncio.sleep(0.001)
    records = [json.loads(line) for line in log.read_text().splitlines()]
    assert records[0]["reason"] == "decode is below its minimum"
    assert records[0]["dry_run"] is (mode == "dry-run")
    assert [record for record in said if isinstance(record, dict)] == records
    assert fake.told == told


def test_every_limit_has_a_flag_and_wrong_ones_are_refused_before_anything_starts() -> None:
    parse = build_parser().parse_args
    given = settle(parse(["up", "--model", "m", "--autoscale", "on", "--autoscale-max-decode", "7",
                          "--autoscale-low", "0.4"]))  # fmt: skip
    options = autoscale_options(given)
    assert (options.mode, options.limits.max_decode, options.limits.low) == ("on", 7, 0.4)
    assert autoscale_options(settle(parse(["up", "--model", "m"]))) == AutoscaleOptions()
    wrong = settle(parse(["up", "--model", "m", "--autoscale", "dry-run", "--autoscale-min-decode", "9"]))
    with pytest.raises(ValueError, match="min_decode must be at least 1, and at most max_decode"):
        autoscale_options(wrong)


@pytest.mark.parametrize(
    "argv", [("drain",), ("list", "decode-0"), ("drain", "decode-0", "--internal-address", "127.0.0.1:1")]
)
async def test_a_worker_order_that_names_too_little_is_refused(argv: tuple[str, ...]) -> None:
    assert await command("worker", *argv) == 2
