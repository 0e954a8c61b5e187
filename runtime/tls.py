"""TLS from PEM files, for both ends of gRPC and for HTTPS: at least TLS 1.2, rotated without a restart.

Files are read at the start, where a bad one is an error, and again when they change. What a connection was opened with
it keeps; the next one gets the new files.
"""

import ssl
from dataclasses import dataclass
from pathlib import Path

import grpc

from runtime.clock import Clock
from runtime.config import flag
from runtime.watched_files import LOOK_INTERVAL_S, WatchedFiles

_PEM_MARK = b"-----BEGIN "


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files of one end of a connection.

    `cert_file` (the whole chain, own certificate first) and `key_file` (not encrypted) are what it shows, `ca_file` is
    who must have signed what the other end shows. A client without `ca_file` trusts the usual public authorities; a
    server without it asks for no certificate.
    """

    cert_file: Path | None = None
    key_file: Path | None = None
    ca_file: Path | None = None

    def __post_init__(self) -> None:
        if (self.cert_file is None) != (self.key_file is None):
            raise ValueError("a certificate file and its key file go together")

    @property
    def paths(self) -> tuple[Path, ...]:
        """Those that are given."""
        return tuple(path for path in (self.cert_file, self.key_file, self.ca_file) if path is not None)


@dataclass(frozen=True, kw_only=True)
class InternalTlsOptions:
    """Flags of mutual TLS on the internal ports, which router and workers have alike."""

    internal_tls_cert_file: Path | None = flag(
        None, "Certificate (PEM) of this process on internal ports; both ends of a connection then show one."
    )
    internal_tls_key_file: Path | None = flag(None, "Its private key (PEM, not encrypted).")
    internal_tls_ca_file: Path | None = flag(None, "Who signs the internal certificates of the cluster (PEM).")
    internal_tls_name: str = flag(
        "", "Name that internal certificates are issued for. Empty: the address by which the process is reached."
    )

    def validate(self) -> None:
        """Raises ValueError naming the flag."""
        given = (self.internal_tls_cert_file, self.internal_tls_key_file, self.internal_tls_ca_file)
        if any(given) and not all(given):
            raise ValueError("--internal-tls-cert-file, --internal-tls-key-file and --internal-tls-ca-file go together")
        if self.internal_tls_name and not any(given):
            raise ValueError("--internal-tls-name needs --internal-tls-cert-file")

    @property
    def internal_tls(self) -> TlsFiles | None:
        """None: internal ports speak plain HTTP/2."""
        if self.internal_tls_cert_file is None:
            return None
        return TlsFiles(self.internal_tls_cert_file, self.internal_tls_key_file, self.internal_tls_ca_file)


class ChannelTls:
    """What gRPC channels of one client use. Any thread."""

    def __init__(
        self, files: TlsFiles, clock: Clock, *, server_name: str = "", interval_s: float = LOOK_INTERVAL_S
    ) -> None:
        """`server_name` is whom the server's certificate must name, if not the address dialled. Raises OSError or
        ValueError when the files cannot be used."""
        self._credentials = WatchedFiles(
            files.paths, lambda: _channel_credentials(files), clock, what="client certificates", interval_s=interval_s
        )
        self.options = (("grpc.ssl_target_name_override", server_name),) if server_name else ()

    def credentials(self) -> grpc.ChannelCredentials:
        """Those of a channel that is opened now."""
        return self._credentials.get()


def internal_channel_tls(options: InternalTlsOptions, clock: Clock) -> ChannelTls | None:
    """What channels to internal ports use; None without TLS. Raises OSError or ValueError as `ChannelTls` does."""
    files = options.internal_tls
    return ChannelTls(files, clock, server_name=options.internal_tls_name) if files else None


def server_credentials(files: TlsFiles, clock: Clock, *, interval_s: float = LOOK_INTERVAL_S) -> grpc.ServerCredentials:
    """Credentials of a gRPC server, asynchronous or not; with `ca_file` every client must show a certificate.

    gRPC asks for each new connection, on a thread of its own. Raises OSError or ValueError as `TlsFiles` says.
    """
    watched = WatchedFiles(
        files.paths, lambda: _certificate_configuration(files), clock, what="server certificate", interval_s=interval_s
    )
    current = watched.get()

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        nonlocal current
        newest = watched.get()
        if newest is current:
            return None  # As gRPC wants it: nothing to build anew for this connection.
        current = newest
        return newest

    return grpc.dynamic_ssl_server_credentials(
        # The stubs do not know that None means unchanged.
        current,
        fetch,  # type: ignore[arg-type]
        require_client_authentication=files.ca_file is not None,
    )


def https_context(files: TlsFiles, clock: Clock, *, interval_s: float = LOOK_INTERVAL_S) -> ssl.SSLContext:
    """The context to listen with. Each new connection takes the certificate that the files have then.

    Raises OSError or ValueError when the files cannot be used.
    """
    watched = WatchedFiles(
        files.paths, lambda: _server_context(files), clock, what="server certificate", interval_s=interval_s
    )

    def choose(connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        connection.context = watched.get()

    context = _server_context(files)
    # Called for every greeting of a client, whether it names a server or not.
    context.sni_callback = choose
    return context


def _server_context(files: TlsFiles) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    _load(context, files)
    return context


def _certificate_configuration(files: TlsFiles) -> grpc.ServerCertificateConfiguration:
    if files.cert_file is None or files.key_file is None:
        raise ValueError("a server needs a certificate and its key")
    _load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), files)
    pair = (files.key_file.read_bytes(), files.cert_file.read_bytes())
    return grpc.ssl_server_certificate_configuration([pair], files.ca_file.read_bytes() if files.ca_file else None)


def _channel_credentials(files: TlsFiles) -> grpc.ChannelCredentials:
    _load(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), files)
    return grpc.ssl_channel_credentials(
        files.ca_file.read_bytes() if files.ca_file else None,
        files.key_file.read_bytes() if files.key_file else None,
        files.cert_file.read_bytes() if files.cert_file else None,
    )


def _load(context: ssl.SSLContext, files: TlsFiles) -> None:
    """Let OpenSSL read the files, and say in words what it does not like: gRPC would only fail later, and silently."""
    try:
        if files.cert_file is not None:
            # The password keeps OpenSSL from asking for one on the terminal.
            context.load_cert_chain(files.cert_file, files.key_file, password="")
        if files.ca_file is not None:
            if _PEM_MARK not in files.ca_file.read_bytes():
                raise ValueError(f"{files.ca_file} holds no PEM certificate")
            context.load_verify_locations(cafile=files.ca_file)
    except ssl.SSLError as error:
        names = ", ".join(map(str, files.paths))
        raise ValueError(f"{names}: {error.reason or error}") from None
