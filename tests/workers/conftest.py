"""The tiny model of these tests, saved and prepared once a module."""

from pathlib import Path

import pytest
from transformers import PreTrainedModel

from tests.support.tiny_checkpoints import make_model, save_checkpoint


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return make_model("llama_gqa", seed=3)


@pytest.fixture(scope="module")
def checkpoint(model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("checkpoint"), model)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")
