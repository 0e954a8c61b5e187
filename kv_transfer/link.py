"""One greeted connection: an outbox that any thread may fill, a thread that writes, a thread that reads."""

import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable

from kv_transfer.messages import MAX_MESSAGE_BYTES, HandoffMessage
from kv_transfer.transport import Channel, LinkError
from kv_transfer.wire import encode

MAX_OUTBOX_MESSAGES = 4096

_log = logging.getLogger(__name__)
_numbers = itertools.count(1)


class Link:
    """The moving parts that both ends share. Its owner runs `run_writer` and `run_reader`, each on its own thread.

    A broken link never comes back: the owner makes another, with another `number`.
    How it is stopped depends on who writes into whose memory without asking (`one_sided`): such a sender may close its
    end only after its last copy, and such a receiver must wait for the sender to close.
    """

    def __init__(
        self, *, sends_payload: bool, io_timeout_s: float, on_break: Callable[[], None] = lambda: None
    ) -> None:
        """`on_break` is called when the link is broken off, once, by the thread that does it; it must not block."""
        self.number = next(_numbers)
        self.one_sided = False
        self._sends_payload = sends_payload
        self._io_timeout_s = io_timeout_s
        self._on_break = on_break
        self._changed = threading.Condition()
        self._outbox: deque[HandoffMessage] = deque()
        self._work = False
        self._finishing = False
        self._broken: str | None = None
        self._channel: Channel | None = None

    @property
    def broken(self) -> str | None:
        """Why the link was broken off; None while it works."""
        return self._broken

    def attach(self, channel: Channel) -> None:
        """Give the link its connection. If it was broken off in the meantime, the connection is stopped."""
        with self._changed:
            self._channel = channel
            broken = self._broken is not None
        if broken:
            channel.stop()

    def post(self, message: HandoffMessage) -> None:
        """Send after what was posted before. Any thread; never blocks. A peer that does not read breaks its link."""
        with self._changed:
            if self._broken is not None:
                return
            full = len(self._outbox) >= MAX_OUTBOX_MESSAGES
            if not full:
                self._outbox.append(message)
                self._changed.notify()
        if full:
            self.break_off(f"{MAX_OUTBOX_MESSAGES} messages are waiting for a peer that does not read")

    def wake(self) -> None:
        """Tell the writer that there is payload to write. Any thread; never blocks."""
        with self._changed:
            self._work = True
            self._changed.notify()

    def finish(self) -> None:
        """End the writer once the outbox is empty. Any thread; never blocks."""
        with self._changed:
            self._finishing = True
            self._changed.notify()

    def break_off(self, reason: str) -> None:
        """Stop using the link; what waits to be sent is dropped. Any thread; never blocks; the first reason stays."""
        with self._changed:
            if self._broken is not None:
                return
            self._broken = reason
            self._outbox.clear()
            channel = self._channel
            self._changed.notify()
        self._on_break()
        if channel is None:
            return
        if not self.one_sided:
            channel.stop()
        elif self._sends_payload:
            channel.stop_receiving()
        else:
            channel.stop_sending()

    def run_writer(self, work: Callable[[], bool]) -> None:
        """Send messages, and between them do payload `work` (which says whether there may be more), until the end."""
        try:
            while True:
                message = self._next()
                if message is not None:
                    self._channel_now().send(encode(message), (), self._io_timeout_s)
                elif self._broken is not None or not self._work:
                    return
                else:
                    self._work = False
                    if work():
                        self._work = True
        except LinkError as error:
            self.break_off(str(error))
        except Exception as error:
            _log.exception("the writer of a link failed")
            self.break_off(f"a defect: {error!r}")

    def run_reader(self, handle: Callable[[bytes, int], None], max_payload_bytes: int) -> LinkError:
        """Hand every frame (message, payload size) to `handle`, which takes the payload too; return what ended it."""
        try:
            while True:
                data, size = self._channel_now().receive(
                    max_message_bytes=MAX_MESSAGE_BYTES, max_payload_bytes=max_payload_bytes, timeout_s=None
                )
                handle(data, size)
        except LinkError as error:
            self.break_off(str(error))
            return error
        except Exception as error:
            _log.exception("the reader of a link failed")
            self.break_off(f"a defect: {error!r}")
            return LinkError(f"a defect: {error!r}")

    def _next(self) -> HandoffMessage | None:
        """The next message to send; None when there is payload work or the writer shall end."""
        with self._changed:
            while not (self._outbox or self._work or self._finishing or self._broken is not None):
                self._changed.wait()
            return self._outbox.popleft() if self._outbox and self._broken is None else None

    def _channel_now(self) -> Channel:
        assert self._channel is not None
        return self._channel
