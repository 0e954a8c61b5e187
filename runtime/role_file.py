"""The file in which a worker keeps the role that it was given last, to begin in it when it is started again."""

import logging
from contextlib import suppress
from pathlib import Path
from typing import Literal

Role = Literal["prefill", "decode"]

_log = logging.getLogger(__name__)


def read_role(path: Path | None, otherwise: Role) -> Role:
    """What it says; `otherwise` where there is none, or it cannot be read or says something else. Any thread."""
    if path is not None:
        with suppress(OSError, UnicodeDecodeError):
            match path.read_text().strip():
                case "prefill":
                    return "prefill"
                case "decode":
                    return "decode"
    return otherwise


def write_role(path: Path | None, role: Role) -> None:
    """Replace it, whole. Where that fails, on a full disk, a warning: the worker goes on all the same. Any thread."""
    if path is None:
        return
    temporary = path.with_name(f".{path.name}.new")
    try:
        temporary.write_text(f"{role}\n")
        temporary.rename(path)
    except OSError as error:
        _log.warning("the role of this worker is not kept for its next start: %s", error)
