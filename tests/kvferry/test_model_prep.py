import asyncio
import sys
from pathlib import Path

import pytest

from kvferry.model_prep import PreparedDir, prepare_model
from runtime.child_process import LaunchError

PREPARE = (sys.executable, str(Path(__file__).parents[1] / "support" / "fake_prepare.py"))


async def test_progress_is_passed_on_and_the_prepared_directory_returned(tmp_path: Path) -> None:
    seen: list[tuple[str, float]] = []
    prepared = await prepare_model("tiny", tmp_path, lambda *step: seen.append(step), command=PREPARE)
    assert prepared == PreparedDir(tmp_path / "tiny", "tiny")
    assert seen == [("converting weights", 0.1), ("converting weights", 0.5)]


@pytest.mark.parametrize(
    ("source", "said"), [("missing", "there is no model 'missing'"), ("crash", "conversion needs more memory")]
)
async def test_a_failure_is_told_in_the_words_of_the_one_who_knows(tmp_path: Path, source: str, said: str) -> None:
    with pytest.raises(LaunchError, match=said):
        await prepare_model(source, tmp_path, lambda *_: None, command=PREPARE)


async def test_a_cancelled_preparation_ends_its_process(tmp_path: Path) -> None:
    command = (sys.executable, "-c", 'import time; print(\'{"event": "progress"}\', flush=True); time.sleep(60)')
    begun = asyncio.Event()
    task = asyncio.create_task(prepare_model("m", tmp_path, lambda *_: begun.set(), command=command))
    async with asyncio.timeout(30):
        await begun.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert task.cancelled()


@pytest.mark.parametrize(("dtype", "flags"), [(None, []), ("int8", ["--weight-dtype", "int8"])])
async def test_the_dtype_of_the_weights_is_passed_on_if_one_is_given(
    tmp_path: Path, dtype: str | None, flags: list[str]
) -> None:
    echo = 'import json, sys; print(json.dumps({"event": "error", "message": " ".join(sys.argv[1:])})); sys.exit(1)'
    with pytest.raises(LaunchError) as caught:
        await prepare_model("m", tmp_path, lambda *_: None, command=(sys.executable, "-c", echo), weight_dtype=dtype)
    assert str(caught.value).endswith(" ".join(["--json", *flags]))
