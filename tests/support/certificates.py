"""Certificates for tests: an authority, and whom it signs for. Elliptic keys, since they are made in no time."""

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

LIFE = datetime.timedelta(days=30)


@dataclass(frozen=True)
class Authority:
    """Who signs. `write` puts what it signed, and its own certificate, into files."""

    name: str
    key: ec.EllipticCurvePrivateKey
    certificate: x509.Certificate

    @classmethod
    def create(cls, name: str = "test authority") -> "Authority":
        key = ec.generate_private_key(ec.SECP256R1())
        return cls(name, key, _certificate(name, key, name, key, (), authority=True))

    def write(
        self, directory: Path, stem: str, hosts: tuple[str, ...] = ("127.0.0.1", "localhost")
    ) -> tuple[Path, Path]:
        """A fresh key and its certificate for `hosts` in `stem`.crt and `stem`.key, each replaced in one move."""
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = _certificate(stem, key, self.name, self.key, hosts, authority=False)
        cert_file, key_file = directory / f"{stem}.crt", directory / f"{stem}.key"
        replace(cert_file, _pem(certificate) + _pem(self.certificate))
        replace(key_file, key_pem(key))
        return cert_file, key_file

    def write_own(self, directory: Path, stem: str = "ca") -> Path:
        """Its own certificate, for those who are to trust it."""
        path = directory / f"{stem}.crt"
        replace(path, _pem(self.certificate))
        return path


def key_pem(key: ec.EllipticCurvePrivateKey, password: bytes | None = None) -> bytes:
    """A private key as a file has it."""
    encryption = serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption()
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption)


def replace(path: Path, data: bytes) -> None:
    """As a mounted secret changes: the new file takes the old one's place at once."""
    new = path.with_suffix(path.suffix + ".new")
    new.write_bytes(data)
    new.rename(path)


def serial_of(der: bytes | None) -> int:
    """Which certificate that is."""
    assert der is not None
    return x509.load_der_x509_certificate(der).serial_number


def serial_in(path: Path) -> int:
    """The same of the first certificate in a file."""
    return x509.load_pem_x509_certificate(path.read_bytes()).serial_number


def _certificate(
    subject: str,
    key: ec.EllipticCurvePrivateKey,
    issuer: str,
    issuer_key: ec.EllipticCurvePrivateKey,
    hosts: tuple[str, ...],
    *,
    authority: bool,
) -> x509.Certificate:
    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(_name(subject))
        .issuer_name(_name(issuer))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + LIFE)
        .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
    )
    if hosts:
        builder = builder.add_extension(x509.SubjectAlternativeName(list(map(_host, hosts))), critical=False)
    return builder.sign(issuer_key, hashes.SHA256())


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _host(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        return x509.DNSName(text)


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)
