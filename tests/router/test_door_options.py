"""The router's flags about keys and TLS."""

from pathlib import Path
from typing import Any

import pytest

from router.config import RouterConfig
from runtime.config import parse_config
from runtime.tls import TlsFiles

CERT, KEY, CA = Path("server.crt"), Path("server.key"), Path("ca.crt")


def config(**fields: Any) -> RouterConfig:
    made = RouterConfig(model=Path("m"), cluster_secret_file=Path("s"), **fields)
    made.validate()
    return made


def test_without_flags_there_are_no_keys_and_no_tls() -> None:
    plain = config()
    assert (plain.api_keys_file, plain.http_tls, plain.grpc_tls, plain.internal_tls) == (None, None, None, None)


def test_a_client_authority_is_for_grpc_alone() -> None:
    both = config(tls_cert_file=CERT, tls_key_file=KEY, tls_client_ca_file=CA)
    assert both.http_tls == TlsFiles(CERT, KEY)
    assert both.grpc_tls == TlsFiles(CERT, KEY, CA)


@pytest.mark.parametrize(
    ("fields", "flag"),
    [
        ({"tls_cert_file": CERT}, "--tls-key-file"),
        ({"tls_key_file": KEY}, "--tls-cert-file"),
        ({"tls_client_ca_file": CA}, "--tls-cert-file"),
        ({"protect_metrics": True}, "--api-keys-file"),
        ({"internal_tls_ca_file": CA}, "--internal-tls-cert-file"),
        ({"internal_tls_name": "x"}, "--internal-tls-cert-file"),
    ],
)
def test_flags_that_need_each_other_are_refused_alone(fields: dict[str, Any], flag: str) -> None:
    with pytest.raises(ValueError, match=flag):
        config(**fields)


def test_they_are_flags_of_the_command_line() -> None:
    argv = ["--model", "m", "--cluster-secret-file", "s", "--api-keys-file", "k", "--protect-metrics"]
    parsed = parse_config(RouterConfig, [*argv, "--tls-cert-file", str(CERT), "--tls-key-file", str(KEY)])
    assert (parsed.api_keys_file, parsed.protect_metrics) == (Path("k"), True)
    assert parsed.http_tls == TlsFiles(CERT, KEY)
