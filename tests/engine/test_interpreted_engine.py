"""A whole engine with a GPU's kernels, in Triton's interpreter: all that a GPU runs but the GPU."""

import json
from pathlib import Path

import pytest

from engine.build import plan_engine
from tests.support.device_texts import built, options_for, texts
from tests.support.tiny_checkpoints import make_model, save_checkpoint
from tests.support.triton_programs import INTERPRETED, run_program


@pytest.mark.timeout(900)
def test_kernels_captured_steps_and_staging_give_the_text_of_the_cpu(tmp_path: Path) -> None:
    model = save_checkpoint(tmp_path / "source", make_model("qwen3", num_hidden_layers=1))
    options = options_for(model, tmp_path / "cache")
    expected = texts(built(options, plan_engine(options, available_bytes=None)))
    answers = run_program("tests.support.device_texts", [str(model), str(options.cache_dir)], INTERPRETED, tmp_path)
    assert json.loads(answers.read_text()) == expected
