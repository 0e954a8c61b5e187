"""`kvferry doctor --model`: for people and for programs."""

import json
from pathlib import Path

import pytest

from kvferry.__main__ import main
from kvferry.console import format_table
from kvferry.model_report import model_lines, report_model
from tests.support.foreign_checkpoints import save_foreign
from tests.support.tiny_checkpoints import make_model, save_checkpoint


def _text(source: Path) -> str:
    lines: list[str] = []
    for part in model_lines(report_model(str(source), None)):
        lines += [part] if isinstance(part, str) else format_table(part)
    return "\n".join(lines)


def test_people_read_the_path_the_windows_and_the_costs(tmp_path: Path) -> None:
    text = _text(save_checkpoint(tmp_path / "m", make_model("gemma3")))
    assert "m (gemma3_text) can be served." in text
    assert "path        native" in text
    assert "3: 2 see the last 13 tokens, 1 see the whole context" in text
    assert "fp8_e4m3" in text


def test_people_read_why_a_model_is_not_native(tmp_path: Path) -> None:
    text = _text(save_foreign(tmp_path / "m", "olmo2"))
    assert "through transformers, slower; not native: model_type 'olmo2'" in text
    assert "operations  on a CPU: transformers" in text


def test_programs_read_json_and_a_refusal_is_status_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = save_checkpoint(tmp_path / "m", make_model("llama_gqa"))
    assert main(["doctor", "--model", str(source), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["ok"], report["way"], report["num_layers"], report["windows"]) == (True, "native", 2, [None, None])
    assert report["kv"][0] == {**report["kv"][0], "dtype": "fp32", "bytes_per_token": 256}
    refused = report_model(str(tmp_path / "nothing"), None)
    assert (refused["ok"], "there is no model" in refused["reason"]) == (False, True)
    assert "cannot be served: there is no model" in str(model_lines(refused)[0])
