"""What changes a running cluster from beside its launcher: orders that commands send, and the autoscaler."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from kvferry.control import ControlServer, Handler, Say
from kvferry.launchers.launcher import Launcher
from kvferry.scaling.autoscaler import AutoscaleOptions, Autoscaler, Record, load_policy
from kvferry.scaling.fleet import Fleet
from kvferry.scaling.fleet_admin import FleetAdmin
from runtime.clock import SystemClock
from runtime.errors import invalid
from runtime.tls import InternalTlsOptions, internal_channel_tls


def open_admin(launcher: Launcher) -> FleetAdmin:
    """To the routers of a launcher's cluster, which runs. Raises OSError or ValueError for certificates that are no
    good."""
    spec = launcher.spec
    tls_options = InternalTlsOptions(
        internal_tls_cert_file=spec.internal_tls_cert_file,
        internal_tls_key_file=spec.internal_tls_key_file,
        internal_tls_ca_file=spec.internal_tls_ca_file,
    )
    tls = internal_channel_tls(tls_options, SystemClock())
    return FleetAdmin(launcher.internal_addresses, launcher.secret, tls=tls)


async def scale_cluster(launcher: Launcher, prefill: int | None, decode: int | None, say: Say) -> dict[str, Any]:
    """Have so many workers of each role (None: as many as there are). What was done. Raises as `Fleet.scale`."""
    admin = open_admin(launcher)
    try:
        return asdict(await Fleet(launcher, admin, say).scale(prefill, decode))
    finally:
        await admin.close()


async def replace_workers(launcher: Launcher, say: Say) -> dict[str, str]:
    """Have another worker in the place of each, one at a time; the new names by the old. Raises as `Fleet.replace`."""
    admin = open_admin(launcher)
    try:
        return await Fleet(launcher, admin, say).replace_all()
    finally:
        await admin.close()


class Elasticity:
    """Used as `async with`, around the time that the cluster is up. Event-loop thread only."""

    def __init__(
        self,
        launcher: Launcher,
        options: AutoscaleOptions,
        *,
        control_path: Path | None,
        record_path: Path,
        replace_router: Callable[[], Awaitable[None]] | None = None,
        say: Say,
        emit: Callable[[Record], None],
    ) -> None:
        """`control_path`: of the socket for orders; None takes none. `record_path`: file that gets a line of JSON for
        each decision of the autoscaler; `emit` gets the same. `replace_router`: how the launcher does that; None = it
        cannot. `say`: words for a person.

        Raises ValueError for a policy that does not exist, and as `open_admin`.
        """
        self._options = options
        self._listeners: list[Say] = [say]
        policy = load_policy(options.policy, options.limits)
        self._admin = open_admin(launcher)
        self._fleet = Fleet(launcher, self._admin, self._tell)
        self._record_path = record_path
        self._emit = emit
        dry_run = options.mode == "dry-run"
        self._autoscaler = Autoscaler(self._fleet, policy, self._record, dry_run=dry_run)
        self._replace_router = replace_router
        handlers: dict[str, Handler] = {"scale": self._scale, "restart": self._restart}
        self._control = ControlServer(control_path, handlers) if control_path is not None else None
        self._scaling: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        if self._control is not None:
            try:
                await self._control.start()
            except OSError as error:
                self._tell(f"this cluster takes no orders, and cannot be scaled: {error}")
        if self._options.mode != "off":
            self._scaling = asyncio.create_task(self._autoscaler.run(), name="autoscaler")
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._scaling is not None:
            self._scaling.cancel()
            await asyncio.gather(self._scaling, return_exceptions=True)
        if self._control is not None:
            await self._control.close()
        await self._admin.close()

    async def _scale(self, order: dict[str, Any], say: Say) -> dict[str, Any]:
        counts = []
        for role in ("prefill", "decode"):
            count = order.get(role)
            if not (count is None or (type(count) is int and 0 <= count <= 1024)):
                raise invalid(role, "must be 0 to 1024")
            counts.append(count)
        self._listeners.append(say)
        try:
            return asdict(await self._fleet.scale(*counts))
        finally:
            self._listeners.remove(say)

    async def _restart(self, order: dict[str, Any], say: Say) -> dict[str, Any]:
        """Every worker and then the router, one at a time, each when the one that stands in for it is ready."""
        if self._replace_router is None:
            raise invalid("order", "restart is for clusters of one machine")
        self._listeners.append(say)
        try:
            replaced = await self._fleet.replace_all()
            await self._fleet.replace_router(self._replace_router)
        finally:
            self._listeners.remove(say)
        return {"replaced": replaced}

    def _tell(self, text: str) -> None:
        for say in self._listeners:
            say(text)

    def _record(self, record: Record) -> None:
        self._emit(record)
        # A full disk is no reason to stop looking after the cluster.
        with suppress(OSError), self._record_path.open("a") as file:
            file.write(json.dumps(record) + "\n")
