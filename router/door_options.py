"""Flags of the router about who may come in, and how."""

from dataclasses import dataclass
from pathlib import Path

from runtime.config import flag
from runtime.tls import TlsFiles


@dataclass(frozen=True, kw_only=True)
class DoorOptions:
    """API keys and TLS of the public ports."""

    api_keys_file: Path | None = flag(
        None, "Tenants and the digests of their keys, one JSON object a line, read anew when it changes. None: no keys."
    )
    protect_metrics: bool = flag(False, "Ask for an API key on /metrics too.")
    tls_cert_file: Path | None = flag(None, "Certificate chain (PEM) of the HTTP and gRPC APIs. None: no TLS.")
    tls_key_file: Path | None = flag(None, "Its private key (PEM, not encrypted).")
    tls_client_ca_file: Path | None = flag(
        None, "gRPC clients must show a certificate that one of these (PEM) has signed. HTTP clients never show one."
    )

    def validate(self) -> None:
        """Raises ValueError naming the flag."""
        if (self.tls_cert_file is None) != (self.tls_key_file is None):
            raise ValueError("--tls-cert-file and --tls-key-file go together")
        if self.tls_client_ca_file is not None and self.tls_cert_file is None:
            raise ValueError("--tls-client-ca-file needs --tls-cert-file")
        if self.protect_metrics and self.api_keys_file is None:
            raise ValueError("--protect-metrics needs --api-keys-file")

    @property
    def http_tls(self) -> TlsFiles | None:
        """None: plain HTTP."""
        return TlsFiles(self.tls_cert_file, self.tls_key_file) if self.tls_cert_file else None

    @property
    def grpc_tls(self) -> TlsFiles | None:
        """None: no TLS on the public gRPC port."""
        if self.tls_cert_file is None:
            return None
        return TlsFiles(self.tls_cert_file, self.tls_key_file, self.tls_client_ca_file)
