"""Flags of the router about how many processes it is, and the port of each."""

from dataclasses import dataclass

from runtime.config import flag

MAX_PROCESSES = 32
MAX_WORKERS_AWAITED = 1024  # As many as a router takes.


@dataclass(frozen=True, kw_only=True)
class ProcessOptions:
    """One process, or several that share the HTTP and the gRPC port."""

    router_processes: int = flag(
        1,
        "Router processes behind the HTTP and the gRPC port; workers attach to each, at ports from --internal-port on.",
    )
    process_port: int | None = flag(
        None, "A port more for HTTP where this process alone answers, with several processes the first of as many."
    )
    share_ports: bool = flag(False, "Let other processes of this user listen on the same HTTP and gRPC port.")
    await_workers: int = flag(
        0,
        "Open the HTTP and the gRPC port only once so many workers are attached; 0 opens them at once.",
        unit="workers",
    )

    def validate(self) -> None:
        """Raises ValueError naming the flag."""
        if not 1 <= self.router_processes <= MAX_PROCESSES:
            raise ValueError(f"--router-processes must be 1 to {MAX_PROCESSES}")
        if self.process_port is not None and not 0 <= self.process_port <= 65536 - self.router_processes:
            raise ValueError("--process-port must be 0 to 65535, and so must those that follow it")
        if not 0 <= self.await_workers <= MAX_WORKERS_AWAITED:
            raise ValueError(f"--await-workers must be 0 to {MAX_WORKERS_AWAITED}")
