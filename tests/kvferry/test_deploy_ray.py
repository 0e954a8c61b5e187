"""What docs/deploy.md and deploy/ray say can be typed, and what Ray makes of it. `tests/e2e/test_ray.py` runs it."""

import importlib.util
import json
import runpy
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from kvferry.__main__ import build_parser
from kvferry.cluster_file import settle
from kvferry.commands.in_ray import ray_options
from tests.support.deploy_page import PAGE, page_commands

ROOT = Path(__file__).parents[2]
CLUSTER = ROOT / "deploy" / "ray" / "cluster.yaml"


@pytest.mark.parametrize(("section", "more"), [("Laptop", []), ("Ray", ["restart"])])
def test_every_command_of_the_page_is_one(section: str, more: list[str]) -> None:
    commands = page_commands(section)
    assert [command[1] for command in commands] == ["up", "status", "scale", *more, "down"]
    for command in commands:
        assert command[0] == "kvferry"
        build_parser().parse_args(command[1:])
        assert ("--ray" in command) is (section == "Ray")


def test_the_page_names_every_part_of_a_shape_and_every_default_is_as_it_says() -> None:
    arguments = settle(build_parser().parse_args(["up", "--ray", "--model", "m"]))
    options = ray_options(arguments)
    shape = options.decode
    for name, value in (("cpus", f"{shape.cpus:g}"), ("gpus", f"{shape.gpus:g}"), ("place", f"`{shape.place}`")):
        assert f"| `{name}` | {value} |" in PAGE
    assert f"`--router-cpus` ({options.router_cpus:g};" in PAGE
    assert f"`--placement-timeout` ({options.placement_timeout_s:g} s)" in PAGE
    assert f"`--ray-cluster NAME`, `{options.cluster}`," in PAGE


def test_the_script_is_up_in_ray_detached(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []

    def main(argv: list[str]) -> int:
        seen.append(argv)
        return 7

    monkeypatch.setattr("kvferry.__main__.main", main)
    monkeypatch.setattr(sys, "argv", ["launch.py", "--model", "m", "--decode", "2"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "deploy" / "ray" / "launch.py"), run_name="__main__")
    assert ended.value.code == 7
    assert seen == [["up", "--ray", "--detach", "--model", "m", "--decode", "2"]]
    assert build_parser().parse_args(seen[0]).detach


def test_the_cluster_file_is_what_ray_up_takes_and_keeps_authentication_on() -> None:
    cluster: dict[str, Any] = yaml.safe_load(CLUSTER.read_text())
    spec = importlib.util.find_spec("ray")
    assert spec is not None
    assert spec.origin is not None
    schema = json.loads((Path(spec.origin).parent / "autoscaler" / "ray-schema.json").read_text())
    jsonschema.validate(cluster, schema)
    starts = [
        command
        for part in ("head_start_ray_commands", "worker_start_ray_commands")
        for command in cluster[part]
        if " start " in command
    ]
    assert len(starts) == 2
    assert all(command.startswith("RAY_AUTH_MODE=token ") for command in starts)
    assert "~/.ray/auth_token" in cluster["file_mounts"]
