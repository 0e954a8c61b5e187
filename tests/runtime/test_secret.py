import hmac
import stat
from pathlib import Path

import pytest

from runtime.secret import SECRET_METADATA_KEY, create_secret_file, read_secret_file, secret_matches


def test_a_new_secret_is_readable_by_its_owner_alone_and_reads_back(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    secret = create_secret_file(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert read_secret_file(path) == secret
    assert len(secret) >= 32


def test_an_existing_secret_is_never_replaced(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    create_secret_file(path)
    with pytest.raises(FileExistsError):
        create_secret_file(path)


def test_a_line_end_added_by_an_editor_does_not_matter(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_bytes(b"0123456789abcdef\n")
    assert read_secret_file(path) == b"0123456789abcdef"


@pytest.mark.parametrize("content", [b"", b"short", b"   \n", b"x" * 5000])
def test_a_file_that_holds_no_secret_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "secret"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=str(path)):
        read_secret_file(path)


def test_only_the_exact_secret_matches() -> None:
    secret = b"0123456789abcdef"
    assert secret_matches(secret, [("other", "x"), (SECRET_METADATA_KEY, secret)])
    for metadata in (
        [],
        [(SECRET_METADATA_KEY, b"")],
        [(SECRET_METADATA_KEY, secret[:-1])],
        [("authorization", secret)],
    ):
        assert not secret_matches(secret, metadata)


def test_a_secret_is_compared_in_constant_time_and_never_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    # H033
    compared: list[tuple[bytes, bytes]] = []

    def watched(shown: bytes, secret: bytes) -> bool:
        compared.append((shown, secret))
        return False

    monkeypatch.setattr(hmac, "compare_digest", watched)
    for shown in (b"", b"0123456789abcdef", "key in cyrillic: \u043a\u043b\u044e\u0447"):
        assert not secret_matches(b"0123456789abcdef", [(SECRET_METADATA_KEY, shown)])
    assert len(compared) == 3
