"""What a local cluster consists of, and the command line of each of its processes."""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kv_transfer.options import AUTO, SendOptions, WireDtype, check_names
from kvferry.router_flags import RouterFlags
from router.door_options import DoorOptions
from runtime.config import flag_name
from runtime.tls import InternalTlsOptions
from runtime.tracing import TracingOptions

_DOOR = ("api_keys_file", "protect_metrics", "tls_cert_file", "tls_key_file", "tls_client_ca_file")
_INTERNAL_TLS = ("internal_tls_cert_file", "internal_tls_key_file", "internal_tls_ca_file")
INTERNAL_HOST = "127.0.0.1"  # workers, and the port where they attach: never reachable from elsewhere


@dataclass(frozen=True, slots=True)
class RoleCommands:
    """How each role's process is started; flags follow. Another set lets a test stand in for the real ones."""

    router: tuple[str, ...] = (sys.executable, "-m", "router")
    prefill: tuple[str, ...] = (sys.executable, "-m", "prefill_worker")
    decode: tuple[str, ...] = (sys.executable, "-m", "decode_worker")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSpec:
    """A router and its workers on this host. Flags that are None are not passed: the process's default holds."""

    model_dir: Path
    served_model_name: str
    num_prefill: int = 1
    num_decode: int = 1
    host: str = "127.0.0.1"
    http_port: int = 0
    grpc_port: int = 0
    transports: tuple[str, ...] = (AUTO,)
    forbid_transports: tuple[str, ...] = ()
    kv_wire_dtype: WireDtype = ""
    max_backlog_mb: int | None = None
    lease_s: float | None = None
    block_size: int | None = None
    prefill_block_size: int | None = None
    decode_block_size: int | None = None
    num_blocks: int | None = None
    token_budget: int | None = None
    max_num_seqs: int | None = None
    kv_cache_dtype: str | None = None
    tensor_parallel: int | None = None
    speculative_tokens: int | None = None
    strict_handoff: bool = False
    require_transport: tuple[str, ...] = ()
    reuse_decode_kv: bool | None = None
    api_keys_file: Path | None = None
    protect_metrics: bool = False
    tls_cert_file: Path | None = None
    tls_key_file: Path | None = None
    tls_client_ca_file: Path | None = None
    internal_tls_cert_file: Path | None = None
    internal_tls_key_file: Path | None = None
    internal_tls_ca_file: Path | None = None
    router: RouterFlags = field(default_factory=RouterFlags)
    log_level: str = "info"
    log_json: bool = False
    access_log: bool = False
    otlp_endpoint: str = ""
    trace_file: Path | None = None
    restart: bool = True
    start_timeout_s: float = 180.0
    drain_timeout_s: float = 30.0
    commands: RoleCommands = field(default_factory=RoleCommands)

    def validate(self) -> None:
        """Raises ValueError naming the flag."""
        if self.num_decode < 1 or self.num_prefill < 0:
            raise ValueError("a cluster needs --decode 1 or more and --prefill 0 or more")
        if self.num_decode + self.num_prefill > 64:
            raise ValueError("--prefill and --decode must not exceed 64 processes together on one host")
        if self.tensor_parallel is not None and not 1 <= self.tensor_parallel <= 64:
            raise ValueError("--tensor-parallel must be 1 to 64")
        if self.speculative_tokens is not None and not 0 <= self.speculative_tokens <= 64:
            raise ValueError("--speculative-tokens must be 0 to 64")
        self._check_transfer()
        self._check_door()
        TracingOptions(otlp_endpoint=self.otlp_endpoint).validate()
        for flag, port in (("--http-port", self.http_port), ("--grpc-port", self.grpc_port)):
            if not 0 <= port <= 65535:
                raise ValueError(f"{flag} must be 0 to 65535, not {port}")
        if self.http_port and self.http_port == self.grpc_port:
            raise ValueError("--http-port and --grpc-port must differ")
        if self.num_routers > 32:
            raise ValueError("--router-processes must be 1 to 32")
        if self.start_timeout_s <= 0 or self.drain_timeout_s <= 0:
            raise ValueError("--start-timeout and --drain-timeout must be positive")

    def _check_transfer(self) -> None:
        given = {
            name: getattr(self, name)
            for name in ("transports", "forbid_transports", "kv_wire_dtype", "max_backlog_mb", "lease_s")
        }
        SendOptions(**{name: value for name, value in given.items() if value is not None}).validate()
        check_names("--require-transport", self.require_transport)
        for name in ("block_size", "prefill_block_size", "decode_block_size"):
            if getattr(self, name) not in (None, 8, 16, 32, 64, 128):
                raise ValueError(f"{flag_name(name)} must be a power of two from 8 to 128")

    def _check_door(self) -> None:
        DoorOptions(**{name: getattr(self, name) for name in _DOOR}).validate()
        InternalTlsOptions(**{name: getattr(self, name) for name in _INTERNAL_TLS}).validate()

    @property
    def worker_ids(self) -> tuple[str, ...]:
        """prefill-0, ..., decode-0, ...: stable over restarts."""
        prefill = tuple(f"prefill-{index}" for index in range(self.num_prefill))
        return prefill + tuple(f"decode-{index}" for index in range(self.num_decode))

    @property
    def num_routers(self) -> int:
        """Router processes, each of which workers attach to, at ports in a row."""
        return self.router.router_processes or 1

    @property
    def http_scheme(self) -> str:
        """http, or https where the router has a certificate."""
        return "https" if self.tls_cert_file is not None else "http"

    @property
    def local_host(self) -> str:
        """How processes of this host reach the router's public ports."""
        return {"0.0.0.0": INTERNAL_HOST, "::": "::1"}.get(self.host, self.host)

    def router_argv(self, secret_file: Path, ports: dict[str, int]) -> tuple[str, ...]:
        """Command line of the router; `ports` holds http_port, grpc_port and internal_port (0 = any free one)."""
        name = {"served_model_name": self.served_model_name}
        flags: dict[str, Any] = {**self._common(secret_file), **name, "host": self.host, **ports, **self.router.given}
        flags["internal_host"] = INTERNAL_HOST
        flags["require_transport"] = ",".join(self.require_transport) or None
        for field_name in ("api_keys_file", "tls_cert_file", "tls_key_file", "tls_client_ca_file"):
            flags[field_name] = getattr(self, field_name)
        switches = ["--strict-handoff"] if self.strict_handoff else []
        switches += ["--protect-metrics"] if self.protect_metrics else []
        switches += ["--access-log"] if self.access_log else []
        switches += ["--log-json"] if self.log_json else []
        if self.reuse_decode_kv is not None:
            switches.append("--reuse-decode-kv" if self.reuse_decode_kv else "--no-reuse-decode-kv")
        return (*self.commands.router, *_flags(flags), *switches, "--exit-on-stdin-close")

    def worker_argv(self, worker_id: str, secret_file: Path, router_addresses: str) -> tuple[str, ...]:
        """Command line of one worker that attaches to these, host:port with commas between them."""
        prefill = worker_id.startswith("prefill-")
        own_block_size = self.prefill_block_size if prefill else self.decode_block_size
        flags = {
            **self._common(secret_file),
            "worker_id": worker_id,
            "host": INTERNAL_HOST,
            "port": 0,
            "routers": router_addresses,
            "block_size": self.block_size if own_block_size is None else own_block_size,
            "num_blocks": self.num_blocks,
            "token_budget": self.token_budget,
            "max_num_seqs": self.max_num_seqs,
            "kv_cache_dtype": self.kv_cache_dtype,
            "tensor_parallel": self.tensor_parallel,
            "transports": None if self.transports == (AUTO,) else ",".join(self.transports),
            "forbid_transports": ",".join(self.forbid_transports) or None,
            "max_backlog_mb": self.max_backlog_mb,
            "lease_s": self.lease_s,
        }
        if prefill:  # The one that sends prompts decides what travels.
            flags["kv_wire_dtype"] = self.kv_wire_dtype or None
        else:
            flags["speculative_tokens"] = self.speculative_tokens
        command = self.commands.prefill if prefill else self.commands.decode
        switches = ["--log-json"] if self.log_json else []
        return (*command, *_flags(flags), *switches, "--exit-on-stdin-close")

    def _common(self, secret_file: Path) -> dict[str, Any]:
        return {
            "model": self.model_dir,
            "cluster_secret_file": secret_file,
            "drain_timeout_s": self.drain_timeout_s,
            "log_level": self.log_level,
            "otlp_endpoint": self.otlp_endpoint or None,
            "trace_file": self.trace_file,
            **{name: getattr(self, name) for name in _INTERNAL_TLS},
        }


def _flags(values: dict[str, Any]) -> list[str]:
    parts: list[str] = []
    for name, value in values.items():
        if value is not None:
            # One argument, so that a value that starts with a dash stays a value.
            parts.append(f"{flag_name(name)}={value}")
    return parts
