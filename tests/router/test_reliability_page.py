"""docs/reliability.md names tests; each of them is there."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_test_that_the_page_names_is_there() -> None:
    page = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
    named = re.findall(r"`([a-z0-9_/]+\.py)::(\w+)`", page)
    assert len(named) == page.count("::") > 50
    sources = {path: (ROOT / "tests" / path).read_text(encoding="utf-8") for path, _ in named}
    missing = [f"{path}::{name}" for path, name in named if f"def {name}(" not in sources[path]]
    assert missing == []
    others = re.findall(r"`([a-z0-9_/]+\.py)`", page)
    assert all((ROOT / path).is_file() for path in others)
