"""What tests of the worker registry are made of: blocks, their events, attached workers, a listener."""

from dataclasses import dataclass, field
from typing import Any

from kvferry_rpc.internal_pb2 import KVEvent, Register, Role
from router.workers.attached_worker import AttachedWorker
from router.workers.worker_registry import WorkerRegistry
from tests.support.fake_workers import registration


def block(number: int) -> bytes:
    """The name of a block."""
    return number.to_bytes(16, "little")


def stored(*numbers: int) -> list[KVEvent]:
    """Events of blocks that a worker has stored."""
    return [KVEvent(block_hash=block(number)) for number in numbers]


def removed(*numbers: int) -> list[KVEvent]:
    """Events of blocks that a worker has given up."""
    return [KVEvent(block_hash=block(number), removed=True) for number in numbers]


def attach(registry: WorkerRegistry, worker_id: str = "d0", role: Any = Role.DECODE, **changes: Any) -> AttachedWorker:
    """Attach a worker that need not hear of its replacement."""
    return registry.attach(registration(worker_id, role, **changes), lambda: None)


@dataclass
class Listener:
    """Writes down what a registry tells."""

    told: list[str] = field(default_factory=list)
    rooms: int = 0

    def worker_attached(self, register: Register) -> None:
        self.told.append(f"+{register.worker_id}")

    def worker_detached(self, register: Register) -> None:
        self.told.append(f"-{register.worker_id}")

    def room_changed(self) -> None:
        self.rooms += 1
