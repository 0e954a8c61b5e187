"""Tenant directories for tests: with no key, and with one."""

import hashlib
import json
from pathlib import Path

from router.tenants import TenantDirectory
from runtime.clock import SystemClock


def everybody() -> TenantDirectory:
    """No keys: whoever asks is the anonymous tenant."""
    return TenantDirectory(None, b"", SystemClock())


def tenant_with_key(directory: Path, key: str, tenant: str = "red") -> TenantDirectory:
    """One tenant, who has this key."""
    path = directory / "keys"
    path.write_text(json.dumps({"tenant": tenant, "key_sha256": hashlib.sha256(key.encode()).hexdigest()}))
    return TenantDirectory(path, b"the secret of a cluster", SystemClock())
