"""What a router may tell a worker to do: take no new work, take it again, change its role."""

import logging

from kvferry_rpc.internal_pb2 import Drain, Register, Role, RouterMessage, SetRole
from router.policy import Health
from router.workers.attached_worker import AttachedWorker
from router.workers.registration import refusal_between
from router.workers.worker_registry import WorkerRegistry
from runtime.errors import invalid

ROLE_NAMES = {Role.PREFILL: "prefill", Role.DECODE: "decode"}

_log = logging.getLogger(__name__)


class WorkerOrders:
    """Event-loop thread only. Orders are on their way when a method returns; the worker's `draining` says what came of
    them. Every method raises KvferryError: INVALID_REQUEST as said there, OVERLOADED when the worker reads nothing."""

    def __init__(self, registry: WorkerRegistry) -> None:
        self._registry = registry

    def drain(self, worker_id: str, *, force: bool = False) -> None:
        """Let a worker take no new work, on any router; what runs there goes on, or moves to others with its KV.

        From here on this router gives it none. INVALID_REQUEST: it is not attached; or it is the last of its role that
        is ready, unless `force`.
        """
        worker = self._find(worker_id)
        self._check_not_last(worker, force)
        self._send(worker, RouterMessage(drain=Drain()))
        _log.info("%s is told to take no new work", worker_id)

    def lift_drain(self, worker_id: str) -> None:
        """Let a worker take work again, in the role that it has now. INVALID_REQUEST: it is not attached."""
        worker = self._find(worker_id)
        worker.order(RouterMessage(drain=Drain(over=True)))
        _log.info("%s is told to take work again", worker_id)

    def set_role(self, worker_id: str, role: Role.ValueType, *, force: bool = False) -> None:
        """Let a worker drain and then attach again in this role, or stay if it has that already.

        INVALID_REQUEST: it is not attached; it is the last of its role that is ready, unless `force`; in the new role
        its blocks would not go with those of another worker.
        """
        if role not in ROLE_NAMES:
            raise invalid("role", "must be PREFILL or DECODE")
        worker = self._find(worker_id)
        if worker.register.role == role:
            return
        self._check_not_last(worker, force)
        self._check_fits(worker, role)
        self._send(worker, RouterMessage(set_role=SetRole(role=role)))
        _log.info("%s is told to become a %s worker", worker_id, ROLE_NAMES[role])

    # ---- inside ----

    def _find(self, worker_id: str) -> AttachedWorker:
        for worker, _ in self._registry.attached():
            if worker.register.worker_id == worker_id:
                return worker
        raise invalid("worker_id", f"{worker_id!r} is not attached to this router")

    def _check_not_last(self, worker: AttachedWorker, force: bool) -> None:
        role = worker.register.role
        others = (other for other in self._registry.attached() if other[0] is not worker)
        if not force and not any(other.register.role == role and health is Health.READY for other, health in others):
            raise invalid(
                "worker_id", f"{worker.register.worker_id} is the last {ROLE_NAMES[role]} worker that is ready"
            )

    def _check_fits(self, worker: AttachedWorker, role: Role.ValueType) -> None:
        changed = Register()
        changed.CopyFrom(worker.register)
        changed.role = role
        for other, _ in self._registry.attached():
            if other is worker:
                continue
            if reason := refusal_between(changed, worker.layout, other.register, other.layout):
                raise invalid(
                    "role", f"of {changed.worker_id} cannot change beside {other.register.worker_id}: {reason}"
                )

    def _send(self, worker: AttachedWorker, message: RouterMessage) -> None:
        worker.order(message)
        # At once, and not only when the worker says so: two orders must not take the last two workers of a role.
        self._registry.drain(worker)
