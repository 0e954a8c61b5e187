"""The curl commands of the documentation, run as they stand against a door with a scripted cluster."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.http_door import MODEL, Door, says
from tests.support.threaded_door import threaded_door

ROOT = Path(__file__).parents[2]
_CONSOLE = re.compile(r"^```console\n(.*?)^```", re.DOTALL | re.MULTILINE)
_COMMAND = re.compile(r"^\$ (curl .*(?:\n(?!\$).*)*)", re.MULTILINE)


def commands() -> list[str]:
    """Those of the pages that show how the API is called."""
    blocks = [block for page in ("README.md", "docs/api.md") for block in _CONSOLE.findall((ROOT / page).read_text())]
    return [command.strip() for block in blocks for command in _COMMAND.findall(block)]


def test_the_pages_have_them() -> None:
    paths = {path for command in commands() for path in re.findall(r"8000(/[\w/]+)", command)}
    assert {"/v1/models", "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"} <= paths


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_each_of_them_gets_its_answer() -> None:
    with threaded_door(Door(says("Because of the air."))) as address:
        for command in commands():
            here = command.replace("http://127.0.0.1:8000", address).replace("smollm2-135m-instruct", MODEL)
            done = subprocess.run(
                here.replace("curl ", "curl --fail-with-body ", 1),
                shell=True, executable="/bin/sh", capture_output=True, text=True, timeout=30, check=False,
            )  # fmt: skip
            assert done.returncode == 0, f"{command}: {done.stdout} {done.stderr}"
            is_answer = "tokenize" not in command and "models" not in command
            assert not is_answer or "air" in done.stdout
