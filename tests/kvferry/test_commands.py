import io
import json
import socket
from pathlib import Path
from typing import Any

import pytest

from kvferry import __version__
from kvferry.__main__ import main
from kvferry.commands import base
from kvferry.commands.demo import receipt_problems
from kvferry.commands.registry import COMMANDS
from kvferry.console import format_table
from kvferry.run_dir import RunDir
from kvferry_rpc.common_pb2 import KVReceipt


def _json(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    (line,) = capsys.readouterr().out.splitlines()
    value: dict[str, Any] = json.loads(line)
    return value


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    names = {command.name for command in COMMANDS}
    assert {"up", "chat", "complete", "status", "receipt", "doctor", "demo"} <= names
    assert all(name in shown for name in names)


@pytest.mark.parametrize("command", [command.name for command in COMMANDS])
def test_every_command_has_help_and_json(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    assert "--json" in capsys.readouterr().out


def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"kvferry {__version__}\n"


@pytest.mark.parametrize("argv", [[], ["fly"], ["status", "--no-such-flag"]])
def test_bad_flags_end_with_status_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2
    assert capsys.readouterr().out == ""


def test_chat_streams_the_answer_and_shows_the_receipt(fake_router: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "good day", "--receipt", "--seed", "5", "--address", fake_router]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "good day (messages 1, seed 5) "
    assert "  transport              shm" in lines
    assert "  tokens_recomputed      0" in lines
    assert "  checksum               0102 (verified)" in lines


def test_chat_reads_a_piped_prompt(
    fake_router: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("from a pipe"))
    assert main(["chat", "--address", fake_router, "--system", "be brief"]) == 0
    assert capsys.readouterr().out == "from a pipe (messages 2, seed none) \n"


def test_a_conversation_keeps_its_history_until_told_to_forget(
    fake_router: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    typed = iter(["/receipt", "one", "two", "/receipt", "/new", "three", ""])
    monkeypatch.setattr("kvferry.console.Console.is_interactive", True)
    monkeypatch.setattr("builtins.input", lambda prompt: next(typed))
    assert main(["chat", "--address", fake_router]) == 0
    shown = capsys.readouterr().out
    assert shown.index("no finished answer yet") < shown.index("one (messages 1")
    assert "two (messages 3" in shown
    assert "three (messages 1" in shown
    assert shown.count("tokens_recomputed") == 1


def test_a_conversation_ends_with_the_input(
    fake_router: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def ended(prompt: str) -> str:
        raise EOFError

    monkeypatch.setattr("kvferry.console.Console.is_interactive", True)
    monkeypatch.setattr("builtins.input", ended)
    assert main(["chat", "--address", fake_router]) == 0
    assert "Ctrl-D ends" in capsys.readouterr().out


def test_complete_as_json_is_one_object(fake_router: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["complete", "a b", "--receipt", "--json", "--address", fake_router]) == 0
    value = _json(capsys)
    assert value["text"] == "a b (messages 0, seed none) "
    assert (value["finish_reason"], value["prompt_tokens"], value["completion_tokens"]) == ("stop", 9, 3)
    assert value["receipt"]["bytes_sent"] == 4096


def test_an_interrupted_answer_is_cancelled_and_ends_with_130(
    fake_router: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(self: object, text: str) -> None:
        if not text.startswith(" ["):
            raise KeyboardInterrupt

    monkeypatch.setattr("kvferry.console.Console.stream", interrupt)
    assert main(["complete", "a b", "--json", "--address", fake_router]) == 130
    value = _json(capsys)
    assert (value["finish_reason"], value["text"]) == ("cancelled", "a ")


@pytest.mark.parametrize(
    ("flags", "status", "said"),
    [
        (["--temperature", "3"], 1, "temperature must be in"),
        (["--seed", "-1"], 2, "--seed"),
        (["--max-tokens", "-5"], 2, "--max-tokens"),
        (["--top-k", "99999999999"], 2, "--top-k"),
    ],
)
def test_bad_sampling_says_which_flag(
    fake_router: str, capsys: pytest.CaptureFixture[str], flags: list[str], status: int, said: str
) -> None:
    assert main(["complete", "x", "--address", fake_router, *flags]) == status
    assert said in capsys.readouterr().err


def test_status_shows_workers_blocks_and_requests(fake_router: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--address", fake_router]) == 0
    shown = capsys.readouterr().out
    assert "3 in flight, 1 of them queued" in shown
    assert any(
        line.split()[:6] == ["decode-0", "decode", "ready", "7", "127.0.0.1:1", "60"] for line in shown.split("\n")
    )
    assert main(["status", "--json", "--address", fake_router]) == 0
    value = _json(capsys)
    assert value["requests_in_flight"] == 3
    assert value["workers"][0]["blocks_quarantined"] == 0


def test_receipt_shows_a_kept_receipt_and_says_when_there_is_none(
    fake_router: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["receipt", "req-1", "--json", "--address", fake_router]) == 0
    assert _json(capsys)["checksum_verified"] is True
    assert main(["receipt", "nope", "--json", "--address", fake_router]) == 1
    assert "no receipt of 'nope'" in _json(capsys)["error"]["message"]


def test_a_cluster_is_found_by_its_state(
    fake_router: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDir.create(root=tmp_path)
    run.write_state({"grpc_address": fake_router})
    assert main(["status", "--state-dir", str(run.path)]) == 0
    newest = base.newest_live_state
    monkeypatch.setattr(base, "newest_live_state", lambda: newest(tmp_path))
    assert main(["status"]) == 0
    assert capsys.readouterr().out.count("requests: 3 in flight") == 2


def test_without_a_cluster_the_error_says_how_to_start_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "newest_live_state", lambda: None)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    for where in ([], ["--state-dir", str(tmp_path)], ["--address", address]):
        assert main(["status", *where]) == 1
        assert "kvferry up" in capsys.readouterr().err
    assert main(["status", "--json"]) == 1
    assert _json(capsys)["error"]["code"] == "unavailable"


def test_doctor_reports_as_table_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--no-devices"]) == 0
    assert "Everything needed is here." in capsys.readouterr().out
    assert main(["doctor", "--no-devices", "--json"]) == 0
    value = _json(capsys)
    assert value["ok"] is True
    assert all({"name", "level", "text", "remedy"} == set(finding) for finding in value["findings"])


def test_doctor_fails_when_something_needed_is_missing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvferry.machine._NEEDED", ("no-such-package-at-all",))
    assert main(["doctor", "--no-devices"]) == 1
    assert "pip install no-such-package-at-all" in capsys.readouterr().out


def test_a_table_is_aligned_and_has_no_trailing_blanks() -> None:
    assert format_table([("a", "bb"), ("ccc", "d"), ("e",)]) == ["a    bb", "ccc  d", "e"]
    assert format_table([]) == []


def _good_receipt() -> KVReceipt:
    return KVReceipt(
        prefill_worker="prefill-0", decode_worker="decode-0", blocks_sent=2, checksum_verified=True, transport="tcp"
    )


def test_a_proven_hand_off_has_no_problems() -> None:
    assert receipt_problems(_good_receipt()) == []


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("tokens_recomputed", 4, "4 prompt tokens"),
        ("checksum_verified", False, "not verified"),
        ("transport", "local", "'local'"),
        ("blocks_sent", 0, "no KV blocks"),
        ("prefill_worker", "decode-0", "no KV blocks"),
    ],
)
def test_each_thing_a_receipt_fails_to_prove_is_a_problem(field: str, value: Any, said: str) -> None:
    receipt = _good_receipt()
    setattr(receipt, field, value)
    (problem,) = receipt_problems(receipt)
    assert said in problem
