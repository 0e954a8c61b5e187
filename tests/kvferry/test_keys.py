"""`kvferry keys new`, and how commands show a key and speak TLS."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvferry.__main__ import main
from kvferry.cluster_spec import ClusterSpec
from router.tenants import TenantDirectory
from runtime.clock import ManualClock
from runtime.errors import KvferryError


def made(capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, Any]:
    assert main(["keys", "new", "--tenant", "red", "--json", *flags]) == 0
    value: dict[str, Any] = json.loads(capsys.readouterr().out)
    return value


def test_the_line_of_a_new_key_lets_it_in_and_does_not_hold_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--max-in-flight", "3", "--max-queued-tokens", "5000", "--max-tokens-per-minute", "600")
    new = made(capsys, *flags, "--weight", "2.5", "--max-priority", "-4")
    other = made(capsys)
    path = tmp_path / "keys"
    path.write_text(json.dumps(new["entry"]) + "\n")
    directory = TenantDirectory(path, b"the secret of a cluster", ManualClock())
    tenant = directory.authenticate(new["key"])
    assert (tenant.name, tenant.weight, tenant.max_priority) == ("red", 2.5, -4)
    assert (tenant.max_in_flight, tenant.max_queued_tokens, tenant.max_tokens_per_minute) == (3, 5000, 600)
    with pytest.raises(KvferryError):
        directory.authenticate(other["key"])
    assert new["key"] not in path.read_text()
    assert len(new["key"]) > 40


def test_the_key_and_its_line_are_shown_to_people_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", "new", "--tenant", "red"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("key:   kvf-")
    assert json.loads(lines[1].partition(" ")[2])["tenant"] == "red"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--tenant", "a b"), "--tenant"),
        (("--tenant", ""), "--tenant"),
        (("--tenant", "red", "--max-in-flight", "0"), "--max-in-flight"),
        (("--tenant", "red", "--weight", "0"), "--weight"),
        (("--tenant", "red", "--weight", "nan"), "--weight"),
        (("--tenant", "red", "--max-priority", "101"), "--max-priority"),
    ],
)
def test_what_the_router_would_refuse_is_refused_at_once(
    flags: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["keys", "new", *flags]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("content", [b"", b"two words", "k\u00e9y".encode(), b"x" * 600])
def test_a_key_file_without_one_key_is_refused(
    content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "key"
    path.write_bytes(content)
    for name in (path, tmp_path / "nothing"):
        assert main(["status", "--address", "127.0.0.1:1", "--api-key-file", str(name)]) == 2
        assert str(name) in capsys.readouterr().err


def test_certificates_that_are_no_good_are_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "ca.crt"
    path.write_text("nonsense")
    for name in (path, tmp_path / "nothing"):
        assert main(["status", "--address", "127.0.0.1:1", "--tls-ca-file", str(name)]) == 2
        assert str(name) in capsys.readouterr().err
    assert main(["status", "--address", "127.0.0.1:1", "--tls-cert-file", str(path)]) == 2


def test_a_local_cluster_passes_its_door_on_to_the_router_and_its_internal_tls_to_all() -> None:
    path = Path("/some/file")
    internal = {f"internal_tls_{name}_file": path for name in ("cert", "key", "ca")}
    spec = ClusterSpec(
        model_dir=path, served_model_name="m", api_keys_file=path, protect_metrics=True, tls_cert_file=path,
        tls_key_file=path, tls_client_ca_file=path, **internal,
    )  # fmt: skip
    spec.validate()
    router = spec.router_argv(path, {"http_port": 0})
    worker = spec.worker_argv("decode-0", path, "127.0.0.1:1")
    for flag in ("--api-keys-file", "--tls-cert-file", "--tls-key-file", "--tls-client-ca-file"):
        assert f"{flag}={path}" in router
        assert not [part for part in worker if part.startswith(flag)]
    assert "--protect-metrics" in router
    for argv in (router, worker):
        assert {f"--internal-tls-{name}-file={path}" for name in ("cert", "key", "ca")} <= set(argv)
    assert spec.http_scheme == "https"


@pytest.mark.parametrize(
    "fields",
    [
        {"tls_cert_file": Path("x")},
        {"tls_key_file": Path("x")},
        {"tls_client_ca_file": Path("x")},
        {"protect_metrics": True},
        {"internal_tls_cert_file": Path("x")},
    ],
)
def test_flags_that_need_each_other_are_refused_alone(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="--"):
        ClusterSpec(model_dir=Path("x"), served_model_name="m", **fields).validate()
