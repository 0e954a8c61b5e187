"""Sizing an engine before its memory is taken."""

from pathlib import Path

import pytest

from engine.build import plan_engine
from engine.options import EngineOptions
from tests.support.tiny_checkpoints import make_model, save_checkpoint


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("source"), make_model("llama_gqa"))


def test_the_pool_takes_a_quarter_of_the_memory_unless_told_otherwise(source: Path, tmp_path: Path) -> None:
    options = EngineOptions(model=str(source), cache_dir=tmp_path)
    plan = plan_engine(options, available_bytes=4_000_000)
    assert 900_000 < plan.pool_bytes <= 1_000_000
    assert plan_engine(options, available_bytes=None).pool_bytes <= 2 * 1024**3


def test_a_pool_that_does_not_fit_the_memory_is_refused_with_both_sizes(source: Path, tmp_path: Path) -> None:
    options = EngineOptions(model=str(source), cache_dir=tmp_path, num_blocks=10_000)
    with pytest.raises(ValueError, match=r"--num-blocks\) needs \d+ MiB of memory, 10 MiB are available"):
        plan_engine(options, available_bytes=10 * 2**20)


def test_a_context_that_the_model_lacks_is_refused(source: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="limit of 256"):
        plan_engine(EngineOptions(model=str(source), cache_dir=tmp_path, max_context_tokens=257), available_bytes=None)


def test_the_door_knows_the_smaller_of_context_and_pool(source: Path, tmp_path: Path) -> None:
    options = EngineOptions(model=str(source), cache_dir=tmp_path, num_blocks=3, block_size=16)
    plan = plan_engine(options, available_bytes=None)
    assert plan.limits.max_context_tokens == 48
    assert plan.facts(options)["max_context_tokens"] == 48
