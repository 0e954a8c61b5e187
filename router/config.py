"""Configuration of the router."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kv_transfer.choice import PREFERENCE
from router.dispatch.dispatch_limits import DispatchLimits
from router.door_options import DoorOptions
from router.process_options import ProcessOptions
from router.queue_options import QueueOptions
from runtime.config import flag, required_flag
from runtime.limits import DEFAULT_REQUEST_TIMEOUT_S
from runtime.tls import InternalTlsOptions
from runtime.tracing import TracingOptions

TRANSPORTS = tuple(name for name in PREFERENCE if name != "memory")  # That one ends at the process.
_MAX_SERVED_NAME_CHARS = 256


@dataclass(frozen=True, kw_only=True)
class RouterConfig(DoorOptions, QueueOptions, InternalTlsOptions, TracingOptions, ProcessOptions):
    """The kvferry router: front door of a cluster."""

    model: Path = required_flag("Prepared model directory; only its tokenizer and configuration are read.")
    served_model_name: str = flag("", "Name of the model in the APIs; empty = the name of its directory.")
    cluster_secret_file: Path = required_flag("File with the secret that all processes of the cluster share.")
    host: str = flag("127.0.0.1", "Address of the HTTP and gRPC APIs.")
    http_port: int = flag(8000, "Port of the HTTP API; 0 takes a free one.")
    grpc_port: int = flag(8001, "Port of the gRPC API; 0 takes a free one.")
    internal_host: str = flag("", "Address where workers attach; empty = the same as --host.")
    internal_port: int = flag(8002, "Port where workers attach; 0 takes a free one.")
    request_timeout_s: float = flag(DEFAULT_REQUEST_TIMEOUT_S, "Longest time a request may take.")
    max_in_flight: int = flag(256, "Requests that run at the same time; each choice of n counts.", unit="requests")
    max_queued: int = flag(1024, "Requests that wait for a place; one more is refused at once.", unit="requests")
    max_queued_tokens: int = flag(
        4_000_000, "Tokens of the requests that wait, prompts and expected answers; more are refused at once."
    )
    max_room_wait_s: float = flag(120.0, "Longest wait for room on a worker once every one is full.")
    strict_handoff: bool = flag(False, "Fail a request whose hand-off from a prefill worker is not proven whole.")
    require_transport: tuple[str, ...] = flag(
        (), "KV transports that will do: others fail with --strict-handoff, else warn. Empty: what both ends expected."
    )
    reuse_decode_kv: bool = flag(True, "Let prefill workers pull KV that only decode workers have cached.")
    tool_parser: Literal["auto", "hermes", "llama3", "mistral", "none"] = flag(
        "auto", "How the model writes tool calls; auto tells from its chat template. Where unknown, tools are refused."
    )
    reasoning_parser: Literal["auto", "think", "none"] = flag(
        "auto", "think: <think> blocks become reasoning_content; auto: if the chat template has that marker."
    )
    receipts_kept: int = flag(4096, "KV receipts kept for later questions.", unit="receipts")
    heartbeat_s: float = flag(5.0, "A worker silent for this long is avoided, for three times as long cut off.")
    drain_timeout_s: float = flag(60.0, "Longest time to finish running requests after SIGTERM.")
    log_level: Literal["debug", "info", "warning", "error"] = flag("info", "Least severe log lines to write.")
    log_json: bool = flag(False, "Write log lines as JSON.")
    access_log: bool = flag(False, "Log a line for each request; without any of its text.")
    exit_on_stdin_close: bool = flag(False, "Drain and exit when standard input closes.")

    def validate(self) -> None:
        """Raises ValueError naming the flag."""
        DoorOptions.validate(self)
        QueueOptions.validate(self)
        InternalTlsOptions.validate(self)
        TracingOptions.validate(self)
        ProcessOptions.validate(self)
        if len(self.served_model_name) > _MAX_SERVED_NAME_CHARS:
            raise ValueError(f"--served-model-name must have at most {_MAX_SERVED_NAME_CHARS} characters")
        ports = {"http": self.http_port, "grpc": self.grpc_port, "internal": self.internal_port}
        for name, port in ports.items():
            if not 0 <= port <= 65535:
                raise ValueError(f"--{name}-port must be 0 to 65535, not {port}")
        chosen = [port for port in ports.values() if port]
        if len(set(chosen)) != len(chosen):
            raise ValueError("--http-port, --grpc-port and --internal-port must differ")
        if self.internal_port + self.router_processes > 65536:
            raise ValueError("--internal-port, and those that follow it for --router-processes, must be at most 65535")
        unknown = [name for name in self.require_transport if name not in TRANSPORTS]
        if unknown:
            known = ", ".join(TRANSPORTS)
            raise ValueError(f"--require-transport must be some of {known}, not {', '.join(unknown)}")
        for name in ("max_in_flight", "max_queued", "max_queued_tokens", "receipts_kept"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 1")
        for name in ("request_timeout_s", "max_room_wait_s", "heartbeat_s", "drain_timeout_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"--{name.replace('_', '-')} must be positive")

    @property
    def model_name(self) -> str:
        """The name that clients use."""
        return self.served_model_name or self.model.resolve().name

    @property
    def dispatch_limits(self) -> DispatchLimits:
        """The dispatcher's share."""
        return DispatchLimits(
            max_in_flight=self.max_in_flight,
            max_queued=self.max_queued,
            max_queued_tokens=self.max_queued_tokens,
            max_room_wait_s=self.max_room_wait_s,
            forecast_tokens=self.kv_forecast_tokens,
            slo_classes=self.slo_classes,
            strict_handoff=self.strict_handoff,
            require_transports=self.require_transport,
            reuse_decode_kv=self.reuse_decode_kv,
        )
