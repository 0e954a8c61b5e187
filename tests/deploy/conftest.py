"""Renderings that several tests judge."""

import pytest

from tests.support.manifests import COMPONENTS, Document, composed


@pytest.fixture(scope="session")
def with_everything(tmp_path_factory: pytest.TempPathFactory) -> tuple[Document, ...]:
    """The overlay `local-cpu` with every component."""
    return composed(tmp_path_factory.mktemp("everything"), "local-cpu", COMPONENTS)
