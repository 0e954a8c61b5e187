"""A decode worker without an engine that can hand its answers over to another one."""

import asyncio
from typing import Any

from kvferry_rpc.common_pb2 import Error, ErrorCode
from kvferry_rpc.internal_pb2 import DecodeEvent, HandOver, Paused, PrefillDone
from tests.support.fake_workers import CHECKSUM, Fabric, FakeDecode, error


class MovingDecode(FakeDecode):
    """`hand_overs` tells what it was asked to send, `pauses` and `resumes` of whom it was asked that."""

    def __init__(self, worker_id: str, fabric: Fabric) -> None:
        super().__init__(worker_id, fabric)
        self.pauses: list[tuple[str, int]] = []
        self.resumes: list[tuple[str, int]] = []
        self.hand_overs: list[HandOver] = []
        # Knobs.
        self.pause_refusals: list[Error] = []  # The next pauses are refused with these.
        self.hand_over_refusals: list[Error] = []  # The next hand-overs go on here, for these reasons.
        self.hand_over_failures: list[Error] = []  # The next hand-overs lose the sequence.
        self.hand_over_gate: asyncio.Event | None = None  # Hand-overs wait for it.
        self.sent_gate: asyncio.Event | None = None  # The word that it was sent waits for it.
        self.drops_at_hand_over = False  # The session breaks instead.
        self.sent_checksum = CHECKSUM
        self.sent_by = "tcp"
        self._fabric = fabric
        self.move = self._step
        self._tasks: set[asyncio.Task[None]] = set()

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await super().stop()

    async def refuse_all(self, reason: Error) -> None:
        """Fail what waits for its ticket."""
        for (request_id, attempt), sequence in list(self.live.items()):
            if sequence.task is not None:
                sequence.task.cancel()
            del self.live[(request_id, attempt)]
            for outbox in self._outboxes:
                outbox.put_nowait(DecodeEvent(request_id=request_id, attempt=attempt, failed=reason))
        await self._note()

    async def _step(self, command: Any, outbox: "asyncio.Queue[DecodeEvent | None]") -> None:
        kind = command.WhichOneof("kind")
        message = getattr(command, kind)
        key = (message.request_id, message.attempt)
        sequence = self.live.get(key)
        if kind == "resume":
            self.resumes.append(key)
            if sequence is not None:
                sequence.may_run.set()
        elif kind == "pause":
            self.pauses.append(key)
            if sequence is not None:
                self._pause(key, outbox)
        elif sequence is not None:
            self.hand_overs.append(message)
            task = asyncio.create_task(self._hand_over(key, message, outbox))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        await self._note()

    def _pause(self, key: tuple[str, int], outbox: "asyncio.Queue[DecodeEvent | None]") -> None:
        names = {"request_id": key[0], "attempt": key[1]}
        if self.pause_refusals:
            outbox.put_nowait(DecodeEvent(**names, resumed=self.pause_refusals.pop(0)))
            return
        self.live[key].may_run.clear()
        outbox.put_nowait(DecodeEvent(**names, paused=Paused()))

    async def _hand_over(
        self, key: tuple[str, int], message: HandOver, outbox: "asyncio.Queue[DecodeEvent | None]"
    ) -> None:
        names = {"request_id": key[0], "attempt": key[1]}
        if self.hand_over_gate is not None:
            await self.hand_over_gate.wait()
        if self.drops_at_hand_over:
            outbox.put_nowait(None)
            return
        if self.hand_over_refusals:
            self.live[key].may_run.set()
            outbox.put_nowait(DecodeEvent(**names, resumed=self.hand_over_refusals.pop(0)))
            return
        leaving = self.live.pop(key, None)
        if leaving is not None and leaving.task is not None:
            leaving.task.cancel()
        target = self._fabric.decodes[message.ticket.decode_worker_id]
        sequence = target.live.get((key[0], message.ticket.attempt))
        if sequence is None or self.hand_over_failures:
            failure = self.hand_over_failures.pop(0) if self.hand_over_failures else None
            outbox.put_nowait(DecodeEvent(**names, failed=failure or error(ErrorCode.HANDOFF_FAILED, "aborted")))
        else:
            sequence.committed.set()
            if self.sent_gate is not None:
                await self.sent_gate.wait()
            outbox.put_nowait(DecodeEvent(**names, handed_over=self._sent()))
        await self._note()

    def _sent(self) -> PrefillDone:
        return PrefillDone(
            blocks_sent=3,
            bytes_sent=3 * 4096,
            transport=self.sent_by,
            expected_transport=self.sent_by,
            checksum=self.sent_checksum,
            transfer_ms=2,
        )
