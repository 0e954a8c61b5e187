"""The router's one long-lived stream to a decode worker: commands out, events of all its requests in.

Life of a session:
1. Connect, open the stream, send Hello with the incarnation that is attached. A worker of another life refuses it.
2. Commands go out in order; each event goes to the inbox of its (request, attempt), unknown ones to
   nobody. Events are given out at once, but for a router that is busy: what comes while it still works on the last ones
   waits as long again (`pacer.py`), so that more tokens share the work that each delivery makes.
3. The stream breaks: every request on it fails with UNAVAILABLE, and the session connects again after a jittered
   wait, for as long as the worker is attached. Admit says UNAVAILABLE meanwhile.
4. The worker detaches: what it said before may still be on its way on this stream, so that is read to its end, which
   is at most a moment off; then the session is closed, and the requests that have no end fail likewise.
"""

import asyncio
import logging
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import grpc

from kvferry_rpc.common_pb2 import ErrorCode
from kvferry_rpc.internal_pb2 import (
    Admit,
    Cancel,
    DecodeCommand,
    DecodeEvent,
    DecodeEvents,
    Export,
    HandOver,
    Hello,
    Pause,
    Register,
    Resume,
)
from kvferry_rpc.internal_pb2_grpc import DecodeWorkerStub
from router.dispatch.inbox import Inbox
from router.dispatch.pacer import Pacer
from runtime.clock import SystemClock
from runtime.errors import KvferryError
from runtime.protocol_version import CONTROL_VERSION
from runtime.telemetry import describe_defect

CONNECT_TIMEOUT_S = 5.0
LAST_WORDS_S = 0.5
"""How long a worker that has detached may still be heard: its stream ends with its process."""
MAX_OUTBOUND_ADMITS = 1024
_FIRST_BACKOFF_S = 0.05
_LONGEST_BACKOFF_S = 2.0

_DETACHED = "it is no longer attached"

_log = logging.getLogger(__name__)

_Key = tuple[str, int]
_Call = grpc.aio.StreamStreamCall[DecodeCommand, DecodeEvents]
# What a broken stream can raise; a write to a dead call gives an empty InvalidStateError or a UsageError.
_BROKEN = (grpc.RpcError, grpc.aio.UsageError, asyncio.InvalidStateError, TimeoutError, OSError)


class _State(Enum):
    CONNECTING = "connecting"  # For the first time: admit waits.
    OPEN = "open"
    BROKEN = "broken"  # Waiting to connect again: admit fails at once.
    CLOSED = "closed"


@dataclass(slots=True, eq=False)
class _Request:
    inbox: Inbox
    sent: bool = False
    cancelled: bool = False


class DecodeSession:
    """One decode worker's session. Event-loop thread only."""

    def __init__(
        self,
        register: Register,
        router_id: str,
        connect: Callable[[str], grpc.aio.Channel],
        on_broken: Callable[[str], None],
        rng: random.Random,
    ) -> None:
        """`connect` makes a channel to an address; `on_broken` is told the worker id each time the stream breaks."""
        self._register = register
        self._router_id = router_id
        self._connect = connect
        self._on_broken = on_broken
        self._rng = rng
        self._state = _State.CONNECTING
        self._settled = asyncio.Event()  # Set for good when the first connection succeeded or failed.
        self._requests: dict[_Key, _Request] = {}
        self._outbound: deque[tuple[DecodeCommand, _Request | None]] = deque()
        self._unsent_admits = 0
        self._has_outbound = asyncio.Event()
        self._was_heard = False  # In this life of the stream.
        self._arrived: list[DecodeEvent] = []  # And not given out yet.
        self._pacer = Pacer(self._give_out, SystemClock())
        self._task: asyncio.Task[None] | None = None

    @property
    def worker_id(self) -> str:
        return self._register.worker_id

    @property
    def is_open(self) -> bool:
        """Whether the stream is up, as far as this side knows."""
        return self._state is _State.OPEN

    @property
    def is_settled(self) -> bool:
        """Whether the first connection has succeeded or failed."""
        return self._settled.is_set()

    @property
    def requests_in_flight(self) -> int:
        """Requests admitted and neither ended nor cancelled."""
        return len(self._requests)

    def start(self) -> None:
        """Begin to connect; returns at once."""
        self._task = asyncio.create_task(self._run(), name=f"decode session {self.worker_id}")

    async def admit(self, admit: Admit, inbox: Inbox) -> None:
        """Send a request; its events go to `inbox` until a terminal one, `cancel`, or the end of the stream.

        Waits only while the very first connection is being made (not `is_settled`). Raises KvferryError: UNAVAILABLE
        without a stream, OVERLOADED when too many admissions are unsent.
        """
        await self._settled.wait()
        if self._state is not _State.OPEN:
            raise self._unavailable(f"no session ({self._state.value})")
        if self._unsent_admits >= MAX_OUTBOUND_ADMITS:
            raise KvferryError(ErrorCode.OVERLOADED, f"decode worker {self.worker_id} does not take requests in time")
        request = _Request(inbox)
        self._requests[(admit.request_id, admit.attempt)] = request
        self._unsent_admits += 1
        self._send(DecodeCommand(admit=admit), request)

    def cancel(self, request_id: str, attempt: int) -> None:
        """Stop listening for a request and tell the worker. Never waits; no effect when the request has ended."""
        request = self._requests.pop((request_id, attempt), None)
        if request is None:
            return
        request.cancelled = True
        if request.sent:
            self._send(DecodeCommand(cancel=Cancel(request_id=request_id, attempt=attempt)), None)

    def export(self, export: Export) -> None:
        """Ask the worker to send cached blocks to a prefill worker. Never waits; no effect without a stream."""
        if self._state is _State.OPEN:
            self._send(DecodeCommand(export=export), None)

    def pause(self, request_id: str, attempt: int) -> None:
        """Ask that a sequence stand still. As `resume` and `hand_over`: never waits, no effect when it has ended."""
        self._tell((request_id, attempt), DecodeCommand(pause=Pause(request_id=request_id, attempt=attempt)))

    def resume(self, request_id: str, attempt: int) -> None:
        """Let a sequence go on that stands still."""
        self._tell((request_id, attempt), DecodeCommand(resume=Resume(request_id=request_id, attempt=attempt)))

    def hand_over(self, hand_over: HandOver) -> None:
        """Have a sequence that stands still sent to another worker."""
        self._tell((hand_over.request_id, hand_over.attempt), DecodeCommand(hand_over=hand_over))

    async def leave(self) -> None:
        """The worker has detached: take what it said before that, then close. Nothing is admitted from the call on."""
        self._refuse()
        if self._requests and self._task is not None:
            await asyncio.wait((self._task,), timeout=LAST_WORDS_S)
        await self.close()

    async def close(self) -> None:
        """Close the stream and fail what runs on it. Idempotent."""
        self._refuse()
        self._fail_all(_DETACHED)
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    # ---- inside ----

    def _refuse(self) -> None:
        self._state = _State.CLOSED
        self._settled.set()

    async def _run(self) -> None:
        failures = 0
        while True:
            reason = "the worker closed the stream"
            try:
                await self._live()
            except _BROKEN as error:
                reason = _describe(error)
            except Exception as error:
                _log.error("session with decode worker %s met an unexpected %s", self.worker_id, describe_defect(error))
                reason = f"defect: {type(error).__name__}"
            if self._state is _State.CLOSED:
                self._fail_all(_DETACHED)
                return
            # A worker that accepts and hangs up at once must not be dialled without pause.
            failures = 1 if self._was_heard else failures + 1
            self._state = _State.BROKEN
            self._settled.set()
            self._fail_all(reason)
            _log.log(
                logging.WARNING if failures == 1 else logging.DEBUG,
                "session with decode worker %s broke: %s", self.worker_id, reason,
            )  # fmt: skip
            self._on_broken(self.worker_id)
            backoff_s = min(_LONGEST_BACKOFF_S, _FIRST_BACKOFF_S * 2.0 ** min(failures - 1, 16))
            await asyncio.sleep(backoff_s * self._rng.uniform(0.5, 1.0))

    async def _live(self) -> None:
        """One life of the stream. Returns or raises when it ends."""
        self._was_heard = False
        async with self._connect(self._register.address) as channel:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await channel.channel_ready()
            call: _Call = DecodeWorkerStub(channel).Session()
            try:
                async with asyncio.timeout(CONNECT_TIMEOUT_S):
                    await call.write(DecodeCommand(hello=self._hello()))
                if self._state is not _State.CLOSED:
                    self._state = _State.OPEN
                self._settled.set()
                await self._exchange(call)
            finally:
                call.cancel()

    def _hello(self) -> Hello:
        return Hello(
            router_id=self._router_id,
            incarnation=self._register.incarnation,
            protocol_version=CONTROL_VERSION.major,
            protocol_minor=CONTROL_VERSION.minor,
        )

    async def _exchange(self, call: _Call) -> None:
        reader = asyncio.create_task(self._read(call))
        writer = asyncio.create_task(self._write(call))
        try:
            await asyncio.wait((reader, writer), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (reader, writer):
                task.cancel()
            outcomes = await asyncio.gather(reader, writer, return_exceptions=True)
        # The reader's error first: it carries the status of the call, a failed write only says that it is over.
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                raise outcome

    async def _read(self, call: _Call) -> None:
        loop = asyncio.get_running_loop()
        async for events in call:
            self._was_heard = True
            self._arrived.extend(events.events)
            self._pacer.ask(loop)

    def _give_out(self) -> None:
        arrived, self._arrived = self._arrived, []
        for event in arrived:
            key = (event.request_id, event.attempt)
            request = self._requests.get(key)
            if request is None:
                continue  # Cancelled or ended here; the worker did not know yet when it spoke.
            if event.WhichOneof("kind") in ("done", "failed", "handed_over"):
                del self._requests[key]
            try:
                request.inbox.put_decode(event)
            except Exception as error:  # Tokens go on from there to the client: a defect may not cost the others.
                _log.error("request %s met an unexpected %s", event.request_id, describe_defect(error))
                request.inbox.put_decode_failure(KvferryError(ErrorCode.INTERNAL, f"defect: {type(error).__name__}"))

    async def _write(self, call: _Call) -> None:
        while True:
            while self._outbound:
                command, request = self._outbound.popleft()
                if request is not None:
                    self._unsent_admits -= 1
                    if request.cancelled:
                        continue
                    request.sent = True
                await call.write(command)
            self._has_outbound.clear()
            await self._has_outbound.wait()

    def _tell(self, key: _Key, command: DecodeCommand) -> None:
        if key in self._requests:
            self._send(command, None)

    def _send(self, command: DecodeCommand, request: _Request | None) -> None:
        self._outbound.append((command, request))
        self._has_outbound.set()

    def _fail_all(self, reason: str) -> None:
        """The stream is gone: the worker has released its side, or will when it notices."""
        self._pacer.cancel()
        self._give_out()
        self._outbound.clear()
        self._unsent_admits = 0
        requests, self._requests = self._requests, {}
        for request in requests.values():
            request.inbox.put_decode_failure(self._unavailable(reason))

    def _unavailable(self, reason: str) -> KvferryError:
        return KvferryError(ErrorCode.UNAVAILABLE, f"decode worker {self.worker_id}: {reason}")


def _describe(error: BaseException) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
