"""A worker process: what both `python -m prefill_worker` and `python -m decode_worker` run. They differ in the role
that it begins in."""

from collections.abc import Callable

from decode_worker.role import decode_role
from prefill_worker.role import prefill_role
from runtime.process import run_service
from runtime.role_file import Role
from runtime.telemetry import setup_logging
from runtime.worker_host import host_worker
from runtime.worker_life import HostedWorker
from worker.options import WorkerOptions
from worker.parts import WorkerParts

ROLES: dict[str, Callable[[WorkerParts], HostedWorker]] = {"prefill": prefill_role, "decode": decode_role}


class Worker:
    """The parts of one process, and the roles that it can take. See `runtime.worker_host.RoleTaker`."""

    def __init__(self, options: WorkerOptions, secret: bytes) -> None:
        """As `WorkerParts`."""
        self.parts = WorkerParts(options, secret)

    def take_role(self, role: str) -> HostedWorker:
        return ROLES[role](self.parts)

    def close(self, timeout_s: float) -> None:
        self.parts.close(timeout_s)


def run_worker(options: WorkerOptions, role: Role) -> int:
    """Serve, in this role at first, until drained. Returns the exit status. Main thread only."""
    setup_logging(level=options.log_level, json_lines=options.log_json, process=options.worker_id)
    return run_service(
        lambda shutdown: host_worker(options, role, lambda secret: Worker(options, secret), shutdown),
        exit_on_stdin_close=options.exit_on_stdin_close,
    )
