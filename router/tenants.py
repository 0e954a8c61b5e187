"""Who asks: API keys from a file, and what each tenant may do.

The file has one JSON object a line; empty lines and those that begin with # do not count:

    {"tenant": "search", "key_sha256": ["9f86d0...", "60303a..."], "max_in_flight": 32, "max_tokens_per_minute": 90000}

Only digests of keys are stored. Without a file there is one anonymous tenant that may do everything.

A tenant's prefix cache is its own: the names of its blocks depend on a salt that is made from the cluster secret and
the tenant's name, so equal prompts of two tenants share nothing, and no client can name another one's salt.
"""

import hashlib
import hmac
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from kvferry_rpc.common_pb2 import ErrorCode
from runtime.clock import Clock
from runtime.errors import KvferryError, invalid
from runtime.limits import MAX_PRIORITY
from runtime.watched_files import LOOK_INTERVAL_S, WatchedFiles

ANONYMOUS = ""
MAX_KEY_CHARS = 512
MAX_KEYS = 4096
_MAX_FILE_BYTES = 4 * 1024 * 1024
_MAX_KEYS_A_TENANT = 16
_TENANT_SALT = b"kvferry tenant salt 1\0"
_ANONYMOUS_SALT = b"kvferry anonymous salt 1"
_MAX_COUNT = 2**53

Digest = Annotated[str, Meta(pattern="^[0-9a-fA-F]{64}$")]
Count = Annotated[int, Meta(ge=1, le=_MAX_COUNT)]


class TenantEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One line of the file. A limit that is absent does not exist.

    `key_sha256`: SHA-256 of a key, or of several while keys are changed, in hexadecimal. `max_in_flight` counts
    sequences (each choice of n), `max_queued_tokens` prompt tokens of those that have not begun to answer,
    `max_tokens_per_minute` tokens of prompts and answers. `weight` is the share among tenants that wait.
    `max_priority` is the highest priority that its requests may ask for. An `admin` sees what the other tenants have
    under way.
    """

    tenant: Annotated[str, Meta(pattern="^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
    key_sha256: Digest | Annotated[list[Digest], Meta(min_length=1, max_length=_MAX_KEYS_A_TENANT)]
    max_in_flight: Count | None = None
    max_queued_tokens: Count | None = None
    max_tokens_per_minute: Count | None = None
    weight: Annotated[float, Meta(ge=0.01, le=100.0)] = 1.0
    max_priority: Annotated[int, Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] = 0
    admin: bool = False


@dataclass(frozen=True, slots=True)
class Tenant:
    """Who a request belongs to. See `TenantEntry` for the limits; None = no limit."""

    name: str
    salt: bytes = field(repr=False)
    max_in_flight: int | None = None
    max_queued_tokens: int | None = None
    max_tokens_per_minute: int | None = None
    weight: float = 1.0
    max_priority: int = MAX_PRIORITY
    admin: bool = False

    def may_see(self, tenant: str) -> bool:
        """Whether it may know of requests of that tenant, though not of their text."""
        return self.admin or self.name in (tenant, ANONYMOUS)

    @property
    def is_limited(self) -> bool:
        """Whether its requests have to be counted."""
        limits = (self.max_in_flight, self.max_queued_tokens, self.max_tokens_per_minute)
        return any(limit is not None for limit in limits)

    def salt_for(self, client_salt: str | None) -> bytes:
        """The salt of a request: the tenant's own, split further by what the client named, if anything.

        The anonymous tenant has none unless the client names one. What the client says only goes into a HMAC whose key
        it does not know.
        """
        if client_salt:
            return hmac.digest(self.salt, client_salt.encode(), "sha256")
        return b"" if self.name == ANONYMOUS else self.salt

    def check_priority(self, priority: int) -> int:
        """Raises KvferryError when the tenant may not ask for so high a priority."""
        if priority > self.max_priority:
            raise invalid("priority", f"may be at most {self.max_priority} with this API key")
        return priority

    def check_choices(self, num_sequences: int, field_name: str) -> None:
        """Raises KvferryError when one request is for more sequences than the tenant may ever have at a time."""
        most = self.max_in_flight
        if most is not None and num_sequences > most:
            raise invalid(field_name, f"times the number of prompts may be at most {most} with this API key")


class TenantDirectory:
    """Knows the tenants by key and by name. Event-loop thread only."""

    def __init__(self, path: Path | None, secret: bytes, clock: Clock, *, interval_s: float = LOOK_INTERVAL_S) -> None:
        """`path` None: everybody is the anonymous tenant. The file is read anew when it changes; one that cannot be
        read then keeps the old keys. Raises OSError or ValueError when it cannot be read now."""
        salt = hmac.digest(secret, _ANONYMOUS_SALT, "sha256")
        self._anonymous = Tenant(ANONYMOUS, salt)
        self._keys: WatchedFiles[_Keys] | None = None
        if path is not None:
            self._keys = WatchedFiles(
                (path,), lambda: _read(path, secret), clock, what=f"API keys in {path}", interval_s=interval_s
            )

    @property
    def needs_key(self) -> bool:
        """Whether a request without a key is refused."""
        return self._keys is not None

    def authenticate(self, key: str | None) -> Tenant:
        """The tenant of a key, as the client showed it. Raises KvferryError (UNAUTHENTICATED).

        All digests are compared, each in constant time, whichever matches.
        """
        if self._keys is None:
            return self._anonymous
        if not key or len(key) > MAX_KEY_CHARS or not key.isascii():
            raise _unauthenticated()
        shown = hashlib.sha256(key.encode()).digest()
        found: Tenant | None = None
        for digest, tenant in self._keys.get().by_digest:
            if hmac.compare_digest(digest, shown):
                found = tenant
        if found is None:
            raise _unauthenticated()
        return found

    def find(self, name: str) -> Tenant | None:
        """The tenant of that name as the file has it now; None when it has it no more."""
        if self._keys is None:
            return self._anonymous
        return self._keys.get().by_name.get(name)

    def weight(self, name: str) -> float:
        """The tenant's share among those that wait; 1 for one that is unknown."""
        tenant = self.find(name)
        return tenant.weight if tenant is not None else 1.0


def key_of(authorization: str | None, x_api_key: str | None) -> str | None:
    """The key that a request shows: `Authorization: Bearer KEY`, as OpenAI's clients do, or `x-api-key`, as
    Anthropic's do. None when it shows none."""
    scheme, _, key = (authorization or "").partition(" ")
    if scheme.lower() == "bearer" and key.strip():
        return key.strip()
    return x_api_key


def parse_entries(data: bytes) -> list[TenantEntry]:
    """The entries of a file. Raises ValueError naming the line; never with what stands in it."""
    entries = []
    for number, line in enumerate(data.splitlines(), start=1):
        if line.strip() and not line.lstrip().startswith(b"#"):
            try:
                entries.append(msgspec.json.decode(line, type=TenantEntry))
            except (msgspec.DecodeError, RecursionError) as error:
                raise ValueError(f"line {number}: {error}") from None
    return entries


@dataclass(frozen=True, slots=True)
class _Keys:
    by_digest: Sequence[tuple[bytes, Tenant]]
    by_name: dict[str, Tenant]


def _read(path: Path, secret: bytes) -> _Keys:
    with path.open("rb") as file:
        data = file.read(_MAX_FILE_BYTES + 1)
    if len(data) > _MAX_FILE_BYTES:
        raise ValueError(f"{path} is larger than {_MAX_FILE_BYTES} bytes")
    try:
        return _index(parse_entries(data), secret)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _index(entries: Sequence[TenantEntry], secret: bytes) -> _Keys:
    by_name: dict[str, Tenant] = {}
    by_digest: dict[bytes, Tenant] = {}
    for entry in entries:
        if entry.tenant in by_name:
            raise ValueError(f"tenant {entry.tenant} is there twice: give its keys as one list")
        by_name[entry.tenant] = tenant = _tenant(entry, secret)
        for text in [entry.key_sha256] if isinstance(entry.key_sha256, str) else entry.key_sha256:
            digest = bytes.fromhex(text)
            if digest in by_digest:
                raise ValueError(f"tenants {by_digest[digest].name} and {entry.tenant} have the same key")
            by_digest[digest] = tenant
    if len(by_digest) > MAX_KEYS:
        raise ValueError(f"there are more than {MAX_KEYS} keys")
    return _Keys(tuple(by_digest.items()), by_name)


def _tenant(entry: TenantEntry, secret: bytes) -> Tenant:
    return Tenant(
        name=entry.tenant,
        salt=hmac.digest(secret, _TENANT_SALT + entry.tenant.encode(), "sha256"),
        max_in_flight=entry.max_in_flight,
        max_queued_tokens=entry.max_queued_tokens,
        max_tokens_per_minute=entry.max_tokens_per_minute,
        weight=entry.weight,
        max_priority=entry.max_priority,
        admin=entry.admin,
    )


def _unauthenticated() -> KvferryError:
    return KvferryError(ErrorCode.UNAUTHENTICATED, "The API key is missing or not valid.")
