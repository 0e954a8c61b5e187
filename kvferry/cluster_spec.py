"""What a local cluster consists of, and the command line of each of its processes."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from decode_worker.config import DecodeConfig
from kv_transfer.options import AUTO, WireDtype
from prefill_worker.config import PrefillConfig
from router.config import RouterConfig
from runtime.config import flag_list, flag_name
from runtime.grpc_life import join_host_port
from runtime.role_file import Role

_DOOR_FILES = ("api_keys_file", "tls_cert_file", "tls_key_file", "tls_client_ca_file")
_INTERNAL_TLS = ("internal_tls_cert_file", "internal_tls_key_file", "internal_tls_ca_file")
INTERNAL_HOST = "127.0.0.1"  # a local cluster's workers, and the port where they attach: never reachable from elsewhere
MAX_LOCAL_WORKERS = 64


@dataclass(frozen=True, slots=True)
class RoleCommands:
    """How each role's process is started; flags follow. Another set lets a test stand in for the real ones."""

    router: tuple[str, ...] = (sys.executable, "-m", "router")
    prefill: tuple[str, ...] = (sys.executable, "-m", "prefill_worker")
    decode: tuple[str, ...] = (sys.executable, "-m", "decode_worker")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSpec:
    """A router and its workers on this host. Flags that are None are not passed: the process's default holds.

    `router`, `prefill` and `decode` are more options of those processes, by name; they go over the fields here.
    """

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
    router: Mapping[str, Any] = field(default_factory=dict)
    prefill: Mapping[str, Any] = field(default_factory=dict)
    decode: Mapping[str, Any] = field(default_factory=dict)
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
        if self.num_decode + self.num_prefill > MAX_LOCAL_WORKERS:
            raise ValueError(f"--prefill and --decode must not exceed {MAX_LOCAL_WORKERS} processes together")
        if self.start_timeout_s <= 0 or self.drain_timeout_s <= 0:
            raise ValueError("--start-timeout-s and --drain-timeout-s must be positive")
        for name in ("prefill_block_size", "decode_block_size"):
            if getattr(self, name) not in (None, 8, 16, 32, 64, 128):
                raise ValueError(f"{flag_name(name)} must be a power of two from 8 to 128")
        self._check_processes()

    @property
    def worker_ids(self) -> tuple[str, ...]:
        """prefill-0, ..., decode-0, ...: stable over restarts."""
        prefill = tuple(f"prefill-{index}" for index in range(self.num_prefill))
        return prefill + tuple(f"decode-{index}" for index in range(self.num_decode))

    @property
    def num_routers(self) -> int:
        """Router processes, each of which workers attach to, at ports in a row."""
        return int(self.router.get("router_processes") or 1)

    @property
    def http_scheme(self) -> str:
        """http, or https where the router has a certificate."""
        return "https" if self.tls_cert_file is not None else "http"

    @property
    def local_host(self) -> str:
        """How processes of this host reach the router's public ports."""
        return {"0.0.0.0": INTERNAL_HOST, "::": "::1"}.get(self.host, self.host)

    def internal_addresses(self, host: str, ports: dict[str, int]) -> tuple[str, ...]:
        """Where workers attach, host:port: one port for each router process."""
        first = ports["internal_port"]
        return tuple(join_host_port(host, first + index) for index in range(self.num_routers))

    def router_argv(
        self, secret_file: Path, ports: dict[str, int], internal_host: str = INTERNAL_HOST
    ) -> tuple[str, ...]:
        """Command line of the router; `ports` holds http_port, grpc_port and internal_port (0 = any free one)."""
        return (*self.commands.router, *flag_list(self._router_options(secret_file, ports, internal_host)))

    def worker_argv(
        self,
        worker_id: str,
        secret_file: Path,
        router_addresses: str,
        host: str = INTERNAL_HOST,
        role_file: Path | None = None,
    ) -> tuple[str, ...]:
        """Command line of one worker that attaches to these, host:port with commas between them; others reach it at
        `host`. `role_file`: where it keeps its role."""
        role = role_of(worker_id)
        options = {
            **self._worker_options(role, secret_file),
            "worker_id": worker_id,
            "host": host,
            "routers": tuple(router_addresses.split(",")),
            "role_file": role_file,
        }
        return (*(self.commands.prefill if role == "prefill" else self.commands.decode), *flag_list(options))

    def _check_processes(self) -> None:
        """What the processes would say about their command lines, before minutes of preparing a model."""
        nowhere = Path(".")
        ports = {"http_port": self.http_port, "grpc_port": self.grpc_port, "internal_port": 0}
        RouterConfig(**self._router_options(nowhere, ports, INTERNAL_HOST)).validate()
        place: dict[str, Any] = {"host": INTERNAL_HOST, "routers": (f"{INTERNAL_HOST}:1",)}
        configs = (
            PrefillConfig(**self._worker_options("prefill", nowhere), worker_id="prefill-0", **place),
            DecodeConfig(**self._worker_options("decode", nowhere), worker_id="decode-0", **place),
        )
        for config in configs:
            try:
                config.validate()
            except ValueError as error:
                raise ValueError(f"{config.worker_id}: {error}") from None

    def _router_options(self, secret_file: Path, ports: dict[str, int], internal_host: str) -> dict[str, Any]:
        return _given(
            {
                **self._common(secret_file),
                "served_model_name": self.served_model_name,
                "host": self.host,
                **ports,
                "internal_host": internal_host,
                "require_transport": self.require_transport or None,
                "strict_handoff": self.strict_handoff or None,
                "reuse_decode_kv": self.reuse_decode_kv,
                "access_log": self.access_log or None,
                "protect_metrics": self.protect_metrics or None,
                **{name: getattr(self, name) for name in _DOOR_FILES},
            },
            self.router,
        )

    def _worker_options(self, role: Role, secret_file: Path) -> dict[str, Any]:
        prefill = role == "prefill"
        own_block_size = self.prefill_block_size if prefill else self.decode_block_size
        options = {
            **self._common(secret_file),
            "port": 0,
            "block_size": self.block_size if own_block_size is None else own_block_size,
            "num_blocks": self.num_blocks,
            "token_budget": self.token_budget,
            "max_num_seqs": self.max_num_seqs,
            "kv_cache_dtype": self.kv_cache_dtype,
            "tensor_parallel": self.tensor_parallel,
            "transports": None if self.transports == (AUTO,) else self.transports,
            "forbid_transports": self.forbid_transports or None,
            "max_backlog_mb": self.max_backlog_mb,
            "lease_s": self.lease_s,
            # What one role alone makes use of, the other may want later: a worker can change its role.
            "kv_wire_dtype": self.kv_wire_dtype or None,
            "speculative_tokens": self.speculative_tokens,
        }
        return _given(options, self.prefill if prefill else self.decode)

    def _common(self, secret_file: Path) -> dict[str, Any]:
        return {
            "model": self.model_dir,
            "cluster_secret_file": secret_file,
            "drain_timeout_s": self.drain_timeout_s,
            "log_level": self.log_level,
            "log_json": self.log_json or None,
            "otlp_endpoint": self.otlp_endpoint or None,
            "trace_file": self.trace_file,
            "exit_on_stdin_close": True,
            **{name: getattr(self, name) for name in _INTERNAL_TLS},
        }


def _given(options: dict[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Those that are not left to the process's default; what was said for this process alone goes over the rest."""
    return {name: value for name, value in {**options, **own}.items() if value is not None}


def role_of(name: str) -> Role:
    """The role in which the worker of this name is started."""
    return "prefill" if name.startswith("prefill-") else "decode"
