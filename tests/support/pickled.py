"""What a stranger sends to whoever unpickles what comes."""

from pathlib import Path
from typing import Any


class Bomb:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self._path,)
