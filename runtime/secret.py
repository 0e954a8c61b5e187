"""The cluster secret: how it is made, kept in a file, carried as call metadata and checked."""

import hmac
import os
import secrets
from collections.abc import Iterable
from pathlib import Path

SECRET_METADATA_KEY = "kvferry-secret-bin"
MIN_SECRET_BYTES = 16
MAX_SECRET_BYTES = 4096


def create_secret_file(path: Path) -> bytes:
    """Write a fresh random secret to `path`, readable by its owner alone, and return it.

    Raises FileExistsError when the file is there already: a secret in use is never replaced by accident.
    """
    secret = new_secret()
    write_secret_file(path, secret)
    return secret


def new_secret() -> bytes:
    """A fresh random secret."""
    return secrets.token_hex(32).encode()


def write_secret_file(path: Path, secret: bytes) -> None:
    """Write `secret` to `path`, readable by its owner alone. Raises FileExistsError when the file is there already."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(secret)


def read_secret_file(path: Path) -> bytes:
    """The secret in `path`, without surrounding white space (an editor may have added a line end).

    Raises OSError when it cannot be read and ValueError when it is too short to be a secret or absurdly long.
    """
    secret = path.read_bytes()[: MAX_SECRET_BYTES + 1].strip()
    if not MIN_SECRET_BYTES <= len(secret) <= MAX_SECRET_BYTES:
        raise ValueError(
            f"{path}: a cluster secret has {MIN_SECRET_BYTES} to {MAX_SECRET_BYTES} bytes, not {len(secret)}"
        )
    return secret


def secret_matches(secret: bytes, metadata: Iterable[tuple[str, str | bytes]]) -> bool:
    """Whether call metadata carries `secret`. Takes the same time whatever the wrong bytes are."""
    shown = b""
    for key, value in metadata:
        if key == SECRET_METADATA_KEY:
            shown = value if isinstance(value, bytes) else value.encode()
    return hmac.compare_digest(shown, secret)
