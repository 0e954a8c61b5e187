"""What a worker keeps of its role."""

import logging
from pathlib import Path

import pytest

from runtime.role_file import read_role, write_role


def test_what_was_written_last_is_read_and_stands_over_the_role_of_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "role"
    assert read_role(path, "decode") == "decode"
    write_role(path, "prefill")
    assert read_role(path, "decode") == "prefill"
    write_role(path, "decode")
    assert read_role(path, "prefill") == "decode"
    assert [file.name for file in tmp_path.iterdir()] == ["role"]


@pytest.mark.parametrize("content", [b"", b"router\n", b"\xff\xfe", b"prefill decode"])
def test_a_file_that_says_neither_role_is_as_good_as_none(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "role"
    path.write_bytes(content)
    assert read_role(path, "prefill") == "prefill"


def test_without_a_file_nothing_is_kept(tmp_path: Path) -> None:
    write_role(None, "prefill")
    assert read_role(None, "decode") == "decode"
    assert list(tmp_path.iterdir()) == []


def test_a_role_that_cannot_be_kept_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        write_role(tmp_path / "nowhere" / "role", "prefill")
    assert "is not kept for its next start" in caplog.text
